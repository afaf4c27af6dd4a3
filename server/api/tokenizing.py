"""Tokenizing without holding up the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from server.engine.request import TokenizerLike

INLINE_CHARS = 16_384
"""Shorter texts take well under the time that a change of threads may cost under load."""


async def encode(tokenizer: TokenizerLike, text: str) -> list[int]:
    """Token ids of ``text``; long texts are encoded in a worker thread."""
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text)
    return await asyncio.to_thread(tokenizer.encode, text)


async def encode_chat(tokenizer: TokenizerLike, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    """Token ids of a conversation by the chat template; long ones are encoded in a worker thread."""
    if sum(len(message["content"]) for message in messages) <= INLINE_CHARS:
        return tokenizer.apply_chat_template(messages, **kwargs)
    return await asyncio.to_thread(tokenizer.apply_chat_template, messages, **kwargs)
