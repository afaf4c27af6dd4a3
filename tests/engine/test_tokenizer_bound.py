from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from server.engine.tokenizer import Tokenizer
from server.engine.tokenizer_bound import chars_per_token
from server.node.options import BUNDLED_MODEL
from tests.support.byte_bpe import write_tokenizer_dir

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
SPLIT = {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": False}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = write_tokenizer_dir(tmp_path_factory.mktemp("bpe"))
    content: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text())
    return content


NORMALIZERS: list[Any] = [
    None,
    {"type": "NFC"},
    {"type": "NFKC"},
    {"type": "Lowercase"},
    {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Prepend", "prepend": "_"}]},
    {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    {"type": "Replace", "pattern": {"String": "aaa"}, "content": "b"},
]
PRE_TOKENIZERS: list[Any] = [
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {
        "type": "Sequence",
        "pretokenizers": [
            SPLIT,
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
]
TEXTS = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.sampled_from(["<assistant>", "aaa", "\u1100\u1161\u11a8", "e\u0301", " ", "apples", "\u1f00\u0301\u0345"])
    ).map("".join),
)


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS, ids=["byte level", "split"])
def test_no_text_has_fewer_tokens_than_the_bound_says(
    trained: dict[str, Any], normalizer: Any, pre_tokenizer: Any
) -> None:
    content = {**trained, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    backend = Backend.from_str(json.dumps(content))
    most = chars_per_token(json.loads(backend.to_str()))
    assert most is not None

    @given(TEXTS)
    @settings(max_examples=60, deadline=None, derandomize=True)
    def check(text: str) -> None:
        n_tokens = len(backend.encode(text, add_special_tokens=False).ids)
        assert len(text) <= n_tokens * most

    check()


@given(TEXTS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_bound_holds_for_the_bundled_tokenizer(text: str) -> None:
    assert BUNDLED.chars_per_token is not None
    assert len(text) <= len(BUNDLED.encode(text)) * BUNDLED.chars_per_token


BUNDLED = Tokenizer.load(BUNDLED_MODEL)


def test_the_bound_is_reached() -> None:
    """It is not a number so large that it refuses nothing."""
    [longest] = sorted((BUNDLED.token_text(i) for i in range(BUNDLED.vocab_size)), key=len)[-1:]
    assert len(longest) == BUNDLED.chars_per_token
    assert len(BUNDLED.encode_rendered(longest * 50)) == 50


def test_a_normalizer_that_shrinks_text_widens_the_bound(trained: dict[str, Any]) -> None:
    plain = chars_per_token(trained)
    assert plain is not None
    by_normalizer = [chars_per_token({**trained, "normalizer": normalizer}) for normalizer in NORMALIZERS]
    assert by_normalizer == [plain * factor for factor in (1, 4, 4, 1, 1, 4, 3)]


def test_no_character_composes_more_than_four() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(c))) for c in range(sys.maxunicode + 1)) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "StripAccents"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": ""}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Nmt"}]}},
        {"normalizer": {"type": "of tomorrow"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {**SPLIT, "behavior": "Removed"}},
        {"pre_tokenizer": None},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}},
    ],
    ids=str,
)
def test_rules_that_may_drop_text_have_no_bound(trained: dict[str, Any], change: dict[str, Any]) -> None:
    assert chars_per_token({**trained, **change}) is None


def test_a_token_that_takes_the_spaces_beside_it_has_no_bound(trained: dict[str, Any]) -> None:
    added = [*trained["added_tokens"], {"id": 999, "content": "<mask>", "lstrip": True, "rstrip": False}]
    assert chars_per_token({**trained, "added_tokens": added}) is None


def test_bytes_in_place_of_unknown_characters_are_a_bound() -> None:
    model = {
        "type": "BPE",
        "vocab": {**BYTES, "longest": 256},
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    settings_ = {"model": model, "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}
    assert chars_per_token(settings_) == len("longest")
    assert chars_per_token({"model": {**model, "byte_fallback": False}}) is None


def test_it_loads_with_its_directory(tmp_path: Path) -> None:
    content = json.loads((write_tokenizer_dir(tmp_path) / "tokenizer.json").read_text())
    assert Tokenizer.load(tmp_path).chars_per_token == max(map(len, content["model"]["vocab"]))
