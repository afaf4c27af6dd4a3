"""The tokens of a conversation."""

from __future__ import annotations

from typing import Any

from server.engine.tokenizer import Tokenizer


def chat_ids(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
) -> list[int]:
    """By the model directory's chat template, which sees ``variables``."""
    text = tokenizer.render_chat(messages, variables, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode_rendered(text)
