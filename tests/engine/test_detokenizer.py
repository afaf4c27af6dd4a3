from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from server.engine.detokenizer import REPLACEMENT, Detokenizer
from server.engine.tokenizer import Tokenizer
from tests.support.byte_bpe import write_tokenizer_dir
from tests.support.checkpoints import BUNDLED


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


def broken_prompts(tokenizer: Tokenizer, n_prompts: int, seed: int = 0) -> Iterator[list[int]]:
    """Prompts rich in U+FFFD and in characters of several bytes; half of them are cut somewhere, often inside one."""
    rng = random.Random(seed)
    pieces: list[str | bytes] = [
        REPLACEMENT,
        "�".encode()[:2],
        b"\xff",
        "日",
        "🦊",
        "é",
        "Tom",
        " 42",
        "\n",
        tokenizer.decode([7]),
    ]
    for _ in range(n_prompts):
        chosen = rng.choices(pieces, k=rng.randint(1, 12))
        ids = byte_ids(tokenizer, b"".join(p.encode() if isinstance(p, str) else p for p in chosen))
        if rng.random() < 0.3:  # with the tokenizer's own merges
            ids = tokenizer.encode("".join(p for p in chosen if isinstance(p, str)))
        yield ids[: rng.randint(1, len(ids))] if rng.random() < 0.5 else ids


def answer_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """What a model may say: its own characters, whole and broken, the rest of the prompt's, and special tokens."""
    data = b"".join(rng.choices([b"x", b"\xa5", b"\x97\xa5", b"\xbd", b"\x9f\xa6\x8a", b"\xe6", b"\xff", b"ok"], k=6))
    ids = byte_ids(tokenizer, data)[: rng.randint(0, 8)]
    if rng.random() < 0.3:
        ids.insert(rng.randint(0, len(ids)), next(iter(tokenizer.eos_token_ids)))
    return ids if rng.random() < 0.7 else [rng.randrange(7, tokenizer.vocab_size) for _ in range(rng.randint(0, 8))]


def places(data: Sequence[bytes]) -> list[int]:
    """For each of the tokens' bytes: which character of the decoded whole its first byte is in."""
    whole, at = b"".join(data), 0
    chars: list[int] = []
    while at < len(whole):
        try:
            valid = whole[at:].decode()
            bad = len(valid.encode()), len(valid.encode())
        except UnicodeDecodeError as error:
            valid, bad = whole[at : at + error.start].decode(), (error.start, error.end)
        for i, char in enumerate(valid, start=max(chars, default=-1) + 1):
            chars += [i] * len(char.encode())
        chars += [max(chars, default=-1) + 1] * (bad[1] - bad[0])
        at += bad[1]
    starts = list(itertools.accumulate((len(token) for token in data), initial=0))
    return [[*chars, max(chars, default=-1) + 1][start] for start in starts[:-1]]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for every byte, whatever the merges."""
    by_byte = _ids_of_bytes(tokenizer)
    return [by_byte[bytes([b])] for b in data]


@lru_cache
def _ids_of_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(i): i for i in reversed(range(4, tokenizer.vocab_size))}


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


@pytest.mark.parametrize(("kind", "n_prompts"), [("small", 500), ("bundled", 3000)])
def test_the_answer_is_never_the_text_of_the_prompt(tokenizer: Tokenizer, kind: str, n_prompts: int) -> None:
    """What is given out is the text of both together, less the prompt's own."""
    real = tokenizer if kind == "small" else Tokenizer.load(BUNDLED)
    rng = random.Random(1)
    n_finished = 0
    for prompt in broken_prompts(real, n_prompts):
        answer = answer_ids(real, rng)
        own, whole = real.decode(prompt), real.decode([*prompt, *answer])
        finishes = not whole.startswith(own)  # the answer has finished the prompt's last character
        kept = own[:-1] if finishes else own
        detokenizer = Detokenizer(real, prompt)
        parts = [*(detokenizer.feed(i) for i in answer), detokenizer.flush()]
        assert kept + "".join(parts) == whole, (prompt, answer)
        assert detokenizer.completes_context == finishes
        assert detokenizer.n_chars == len(whole) - len(kept)
        n_finished += finishes
    assert n_finished > n_prompts / 50


def test_a_prompt_without_an_answer_gives_nothing(tokenizer: Tokenizer) -> None:
    for prompt in (byte_ids(tokenizer, b"ab\xe6"), tokenizer.encode("ab" + REPLACEMENT)):
        assert Detokenizer(tokenizer, prompt).flush() == ""


@pytest.mark.parametrize("answer", ["", "日x"])
def test_a_byte_fallback_prompt_is_never_given_out(answer: str) -> None:
    """Here a run of bytes is spelt as a whole: one that is cut makes all of it U+FFFD."""
    tokenizer = ByteFallback()
    for n_cut in range(4):
        data = ("日🦊" * 5 + "日").encode()
        prompt = [0, *(4 + b for b in data[: len(data) - n_cut])]
        rest = [*(4 + b for b in data[len(data) - n_cut :] + answer.encode()), 1]
        expected = tokenizer.decode([*prompt, *rest]).removeprefix("the" + "日🦊" * 5)
        assert "".join(pieces(tokenizer, rest, prompt)) == (expected if n_cut else expected.removeprefix("日"))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_token_begins_where_the_character_of_its_first_byte_is(tokenizer: Tokenizer, data: st.DataObject) -> None:
    several = st.lists(st.sampled_from([b"\xe6\x97\xa5", b"\xf0\x9f\xa6\x8a", b"\xff", b"\xe6\x97", b"ab", b"\x80"]))
    ids = byte_ids(tokenizer, b"".join(data.draw(several)))
    ids += data.draw(st.lists(st.integers(4, 399), max_size=20))
    detokenizer, found, n_chars = Detokenizer(tokenizer), [], []
    for token_id in ids:
        detokenizer.feed(token_id)
        found.append(detokenizer.offset)
        n_chars.append(detokenizer.n_chars)
    assert found == places([tokenizer.token_bytes(i) for i in ids])
    assert n_chars == sorted(n_chars)


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
