"""How log probabilities are spelt in JSON."""

from __future__ import annotations

from typing import Any

from server.engine.request import TokenizerLike, TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def token_key(tokenizer: TokenizerLike, token_id: int) -> str:
    r"""The token's text, or ``bytes:\xe2\x80`` for a part of a character, so that such tokens stay apart."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entry(tokenizer: TokenizerLike, entry: TokenLogprob) -> dict[str, Any]:
    """One element of a chat choice's ``logprobs.content``."""
    top = [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
    return _chat_token(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": top}


def _chat_token(tokenizer: TokenizerLike, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_key(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
