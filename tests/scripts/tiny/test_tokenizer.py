"""The tiny tokenizer: any text, the official tags, and the official fixed texts in few tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny.chat_format import CONTROL_TOKENS, TURN_TOKENS, call_text, tools_block
from tiny.tokenizer import LONGEST_PIECE, build_tokenizer, meanings, save_tokenizer
from tiny.words import LARGEST_NUMBER
from transformers import PreTrainedTokenizerFast

from server.engine.tokenizer import Tokenizer

CALCULATOR = {
    "name": "calculator",
    "description": "Calculates a op b.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "number"},
            "op": {"type": "string", "enum": ["+", "-", "*"]},
            "b": {"type": "number"},
        },
        "required": ["a", "op", "b"],
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize(
    "text",
    [
        "What is 3 + 4 ?",
        "3+4=7",
        "na\u00efve \u4f60\u597d \U0001f600 \n\n\t x",
        'name="x" string="true">< 12345',
        tools_block([CALCULATOR]),
    ],
)
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_every_official_tag_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for tag in (*CONTROL_TOKENS, *TURN_TOKENS):
        assert len(ids_of(tokenizer, f"a{tag}b")) == 3, tag


def test_numbers_are_one_token_with_and_without_a_space(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = meanings(tokenizer)
    for number in range(LARGEST_NUMBER + 1):
        (spaced,), (plain,) = ids_of(tokenizer, f" {number}"), ids_of(tokenizer, f"{number}")
        assert parts[spaced] == parts[plain] == (f"tens {number // 10}", f"ones {number % 10}")


def test_an_offered_calculator_and_its_call_fit_two_windows(tokenizer: PreTrainedTokenizerFast) -> None:
    call = call_text("calculator", {"a": 47, "op": "+", "b": 138})
    assert len(ids_of(tokenizer, tools_block([CALCULATOR]))) <= 128
    assert len(ids_of(tokenizer, call)) <= 40


def test_no_token_is_so_long_that_texts_of_any_size_have_to_be_tokenized(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    per_token = Tokenizer.load(tmp_path).chars_per_token
    assert per_token is not None
    assert per_token <= LONGEST_PIECE


def test_it_has_no_chat_template_like_the_official_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings
    assert not (tmp_path / "chat_template.jinja").exists()
