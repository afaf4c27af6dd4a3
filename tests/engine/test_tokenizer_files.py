"""A directory of the usual kind is read as transformers reads it, and only such a one without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from server.engine.tokenizer import Tokenizer
from server.engine.tokenizer_files import TokenizerFiles, read_by_transformers, read_plain, read_tokenizer_files
from server.node.options import BUNDLED_MODEL
from tests.support.byte_bpe import BOS, EOS, write_tokenizer_dir

Change = dict[str, Any]


def directory(path: Path, config: Change | None = None, tokenizer: Change | None = None) -> Path:
    """A tokenizer directory with fields of its two files replaced; a field that is None is left out."""
    write_tokenizer_dir(path)
    for name, change in (("tokenizer_config.json", config), ("tokenizer.json", tokenizer)):
        content = json.loads((path / name).read_text(encoding="utf-8")) | (change or {})
        content = {key: value for key, value in content.items() if value is not None or name == "tokenizer.json"}
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


def said(files: TokenizerFiles) -> tuple[Any, ...]:
    """Everything that the files say. The serialized backend is all that encoding and decoding depend on."""
    return (
        json.loads(files.backend.to_str()),
        dict(files.special_tokens),
        files.special_ids,
        files.chat_template,
        files.clean_up,
    )


def object_of(content: str) -> Change:
    """A special token as official checkpoints write it, with attributes other than those in tokenizer.json."""
    return {"__type": "AddedToken", "content": content, "lstrip": True, "normalized": True, "rstrip": False,
            "single_word": False}  # fmt: skip


PLAIN: dict[str, tuple[Change, Change]] = {
    "as written": ({}, {}),
    "more special tokens": ({"pad_token": "<user>", "unk_token": EOS}, {}),
    "special tokens as objects": ({"bos_token": object_of(BOS), "eos_token": object_of(EOS)}, {}),
    "no special tokens": ({"bos_token": None, "eos_token": None}, {}),
    "no post processor": ({}, {"post_processor": None}),
    "adds other tokens": ({"add_bos_token": False, "add_eos_token": True}, {}),
    "no template": ({"chat_template": None}, {}),
    "a limit": ({"model_max_length": 7, "clean_up_tokenization_spaces": False, "backend": "tokenizers"}, {}),
    "the class's new name": ({"tokenizer_class": "TokenizersBackend"}, {}),
}


@pytest.mark.parametrize(("config", "tokenizer"), PLAIN.values(), ids=PLAIN)
def test_a_plain_directory_is_read_as_by_transformers(tmp_path: Path, config: Change, tokenizer: Change) -> None:
    model_dir = directory(tmp_path, config, tokenizer)
    plain = read_plain(model_dir)
    assert plain is not None
    assert said(plain) == said(read_by_transformers(model_dir))


def test_a_template_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    (directory(tmp_path) / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    plain = read_plain(tmp_path)
    assert plain is not None
    assert plain.chat_template == "{{ messages }}"
    assert said(plain) == said(read_by_transformers(tmp_path))


def test_the_bundled_directory_is_plain() -> None:
    plain = read_plain(BUNDLED_MODEL)
    assert plain is not None
    assert said(plain) == said(read_by_transformers(BUNDLED_MODEL))


def added_token(path: Path) -> None:
    directory(path, {"pad_token": "<a new token>"})


def padding(path: Path) -> None:
    directory(path)
    backend = read_tokenizer_files(path).backend
    backend.enable_padding(length=9)
    backend.enable_truncation(max_length=5)
    backend.save(str(path / "tokenizer.json"))


def special_tokens_map(path: Path) -> None:
    (directory(path) / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<user>"}), encoding="utf-8")


def several_templates(path: Path) -> None:
    directory(path, {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]})


OTHERS: list[Callable[[Path], Any]] = [
    added_token,
    padding,
    special_tokens_map,
    several_templates,
    lambda path: directory(path, {"tokenizer_class": "LlamaTokenizerFast"}),
    lambda path: directory(path, {"tokenizer_class": None}),
    lambda path: directory(path, {"split_special_tokens": True}),
    lambda path: directory(path, {"extra_special_tokens": ["<user>"]}),
    lambda path: directory(path, {"clean_up_tokenization_spaces": True}),
]


@pytest.mark.parametrize("write", OTHERS, ids=[*"abcdefghi"])
def test_what_is_not_plain_is_left_to_transformers(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path)
    assert read_plain(tmp_path) is None
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Tom has 12 apples.")) == "Tom has 12 apples."


def test_several_templates_stand_for_the_default_one(tmp_path: Path) -> None:
    several_templates(tmp_path)
    assert Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "x"}], {}) == "a"


def test_padding_and_truncation_are_turned_off(tmp_path: Path) -> None:
    padding(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("x")) == 2
    assert len(tokenizer.encode("Tom has 12 apples and buys 30 more." * 9)) > 9


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_text_is_cleaned_up_as_by_transformers(tmp_path: Path, is_forced: bool) -> None:
    """Of this kind of tokenizer only if its settings insist."""
    forced = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": is_forced}
    model_dir = directory(tmp_path, {"clean_up_tokenization_spaces": True} | forced)
    hf = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    ids = hf.encode("a , b .", add_special_tokens=False)
    assert Tokenizer.load(model_dir).decode(ids) == hf.decode(ids) == ("a, b." if is_forced else "a , b .")
