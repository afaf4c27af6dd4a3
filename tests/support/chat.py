"""The tokens of a conversation."""

from __future__ import annotations

from typing import Any

from server.chat.conversation import Conversation
from server.chat.registry import chat_format
from server.engine.tokenizer import Tokenizer


def chat_ids(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
) -> list[int]:
    """By the model directory's chat template, which sees ``variables``."""
    text = tokenizer.render_chat(messages, variables, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode_rendered(text)


def conversation_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """By the chat format that a checkpoint with this tokenizer gets."""
    return tokenizer.encode_rendered(chat_format(tokenizer).render(Conversation(messages)).text)
