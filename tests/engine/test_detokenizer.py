from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from server.engine.detokenizer import Detokenizer
from server.engine.tokenizer import Tokenizer
from tests.api.byte_bpe import write_tokenizer_dir


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer_dir(tmp_path_factory.mktemp("bpe")))


class Counting:
    """A tokenizer that counts how many tokens were decoded in all."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return self.inner.decode(ids)


class ByteFallback:
    """SentencePiece-like: the first word's space is stripped, unknown characters are byte tokens."""

    def __init__(self) -> None:
        words = ["▁the", "▁fox", "▁", "x"]
        vocab = {word: i for i, word in enumerate(words)} | {f"<0x{b:02X}>": len(words) + b for b in range(256)}
        self.backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        self.backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def ids(self, text: str) -> list[int]:
        return [4 + b for b in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids)


def pieces(tokenizer: object, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context or [])  # type: ignore[arg-type]
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for every byte, whatever the merges."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(4, 4 + 256)}
    return [by_byte[bytes([b])] for b in data]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_parts_equal_the_whole_for_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)[1:]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="aé日🦊\u0301", max_size=20))
def test_no_half_character_when_every_byte_is_a_token(tokenizer: Tokenizer, text: str) -> None:
    parts = pieces(tokenizer, byte_ids(tokenizer, text.encode()))
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text
    assert parts[-1] == ""  # nothing is late: a character comes with its last byte


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=120), special_at=st.integers(0, 60))
def test_any_bytes_end_up_as_the_decoded_whole(tokenizer: Tokenizer, data: bytes, special_at: int) -> None:
    ids = byte_ids(tokenizer, data)
    ids.insert(special_at, 1)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=150))
def test_random_tokens_end_up_as_the_decoded_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_unfinished_character_comes_with_flush_only(tokenizer: Tokenizer) -> None:
    parts = pieces(tokenizer, byte_ids(tokenizer, b"ok\xf0\x9f\xa6"))
    assert parts == ["o", "k", "", "", "", "\ufffd"]


@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xef\xbf\xbd", b"\xe2\x82", b"a\xc3", b"\xc3\xe2"])
def test_endless_replacement_characters_are_given_out_before_the_end(tokenizer: Tokenizer, data: bytes) -> None:
    ids = byte_ids(tokenizer, data * 200)
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert len(parts[-1]) <= 16


def test_spaces_of_a_context_dependent_tokenizer_are_kept() -> None:
    tokenizer = ByteFallback()
    assert "".join(pieces(tokenizer, [0, 1, 0, 3, 1])) == "the fox thex fox"
    assert "".join(pieces(tokenizer, [1, 0], context=[0])) == " fox the"


def test_byte_fallback_runs_of_characters_are_not_torn() -> None:
    tokenizer = ByteFallback()
    ids = [0, *tokenizer.ids("🦊🦊é日🦊" * 5), 1]
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts)


def test_character_begun_by_the_prompt_is_given_out_whole(tokenizer: Tokenizer) -> None:
    context, rest = byte_ids(tokenizer, b"ab\xe6\x97"), byte_ids(tokenizer, b"\xa5!")
    assert "".join(pieces(tokenizer, rest, context)) == "日!"


@pytest.mark.parametrize("kind", ["text", "invalid", "special", "emoji", "straddling"])
def test_cost_of_a_token_does_not_grow(tokenizer: Tokenizer, kind: str) -> None:
    n = 2000
    rng = random.Random(0)
    ids = {
        "text": [rng.randrange(4, 400) for _ in range(n)],
        "invalid": byte_ids(tokenizer, b"\x80" * n),
        "special": [1] * n,
        "emoji": byte_ids(tokenizer, "🦊".encode() * (n // 4)),
        "straddling": byte_ids(tokenizer, b"\xf0" + b"\x9f\xa6\x8a\xf0" * (n // 4)),
    }[kind]
    counting = Counting(tokenizer)
    pieces(counting, ids)
    assert counting.decoded < 60 * n
