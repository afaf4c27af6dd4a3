"""How the log probabilities of a prompt's tokens are spelled: as OpenAI's arrays, as vLLM's field, and as SGLang's.

All of it costs as much as the prompt is long: what is long goes into a lane (:data:`INLINE_ENTRIES`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from server.api.answers import finite, token_key
from server.engine.detokenizer import Detokenizer
from server.engine.prompt_logprobs import PromptLogprobs, PromptToken
from server.engine.request import TokenizerLike

INLINE_ENTRIES = 512
"""Up to this many log probabilities are spelled in the event loop: one or two milliseconds."""


def n_entries(found: Iterable[PromptLogprobs | None]) -> int:
    """Log probabilities in ``found``: what it costs to spell them."""
    return sum(len(each) * (1 + each.n_top) for each in found if each is not None)


def openai_arrays(
    tokenizer: TokenizerLike, ids: Sequence[int], text: str, found: PromptLogprobs, n_top: int
) -> dict[str, Any]:
    """The ``logprobs`` of a completion for the tokens ``ids`` of its prompt, which it echoes as ``text``. The first has
    none; each of the others has its ``n_top`` best, and itself among them.
    """
    key = cache(lambda token_id: token_key(tokenizer, token_id))

    def top(token_id: int, token: PromptToken) -> dict[str, float]:
        best = {key(other): finite(logprob) for other, logprob in token.top[:n_top]}
        best.setdefault(key(token_id), finite(token.logprob))
        return best

    tokens = list(found)
    return {
        "tokens": [key(token_id) for token_id in ids],
        "token_logprobs": [None, *(finite(token.logprob) for token in tokens)],
        "top_logprobs": [None, *map(top, ids[1:], tokens)] if n_top else None,
        "text_offset": token_offsets(tokenizer, ids, text),
    }


def vllm_entries(
    tokenizer: TokenizerLike, ids: Sequence[int], found: PromptLogprobs, n_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt but the first an object, by token id, of the token
    itself and the ``n_top`` best.
    """
    text = cache(tokenizer.token_text)

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text(token_id)}

    entries: list[dict[str, Any] | None] = [None]
    for token_id, token in zip(ids[1:], found, strict=True):
        each = {str(token_id): entry(token_id, token.logprob, token.rank)}
        for rank, (other, logprob) in enumerate(token.top[:n_top], start=1):
            each.setdefault(str(other), entry(other, logprob, rank))
        entries.append(each)
    return entries


def sglang_arrays(
    tokenizer: TokenizerLike,
    ids: Sequence[int],
    found: PromptLogprobs,
    *,
    n_top: int = 0,
    start: int = 0,
    with_text: bool = False,
) -> dict[str, Any]:
    """The fields of SGLang's ``meta_info`` for the tokens of the prompt from position ``start`` on:
    ``input_token_logprobs``, and ``input_top_logprobs`` if ``n_top``. Each is (log probability, token id, text or
    null); the prompt's first token has no log probability, and no best ones.
    """
    text = cache(tokenizer.token_text)

    def entry(token_id: int, logprob: float | None) -> list[Any]:
        value = None if logprob is None else finite(logprob)
        return [value, token_id, text(token_id) if with_text else None]

    tokens: list[PromptToken | None] = [None, *found]
    pairs = list(zip(ids, tokens, strict=True))[start:]
    arrays: dict[str, Any] = {
        "input_token_logprobs": [entry(token_id, None if t is None else t.logprob) for token_id, t in pairs]
    }
    if n_top:
        arrays["input_top_logprobs"] = [
            None if token is None else [entry(*best) for best in token.top[:n_top]] for _, token in pairs
        ]
    return arrays


# --- places in the text -----------------------------------------------------------------------------------------------


def token_offsets(tokenizer: TokenizerLike, ids: Sequence[int], text: str) -> list[int]:
    """Where the text of each of ``ids`` begins in ``text``, in characters; of a part of a character, where that is.

    ``text`` is what the client gave, or what the ids were decoded to. A special token has a place of its own only where
    the text spells it.
    """
    offsets = _offsets_by_bytes(_pieces(tokenizer), ids, text)
    return _offsets_by_decoding(tokenizer, ids, text) if offsets is None else offsets


def _pieces(tokenizer: TokenizerLike) -> Callable[[int], tuple[bytes, str]]:
    """What a token stands for: its bytes, and of a special token its name."""

    @cache
    def piece(token_id: int) -> tuple[bytes, str]:
        data = tokenizer.token_bytes(token_id)
        is_special = bool(data) and not tokenizer.decode([token_id])
        return data, data.decode(errors="replace") if is_special else ""

    return piece


def _offsets_by_bytes(piece: Callable[[int], tuple[bytes, str]], ids: Sequence[int], text: str) -> list[int] | None:
    """None if the tokens' bytes are not those of the text, as with tokenizers that normalize it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    built: list[str] = []
    n_chars, is_open = 0, False
    for token_id in ids:
        data, name = piece(token_id)
        if name and not text.startswith(name, n_chars):
            data = b""
        ends_broken = is_open and bool(data) and data[0] & 0xC0 != 0x80
        offsets.append(n_chars + ends_broken)
        built.append(decoder.decode(data))
        n_chars += len(built[-1])
        is_open = bool(decoder.getstate()[0])
    built.append(decoder.decode(b"", final=True))
    return offsets if "".join(built) == text else None


def _offsets_by_decoding(tokenizer: TokenizerLike, ids: Sequence[int], text: str) -> list[int]:
    detokenizer = Detokenizer(tokenizer)
    offsets = []
    for token_id in ids:
        detokenizer.feed(token_id)
        offsets.append(detokenizer.offset)
    end = len(text)
    for i in reversed(range(len(offsets))):  # one that was measured by text that became another
        end = offsets[i] = min(offsets[i], end)
    return offsets
