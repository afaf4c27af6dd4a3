"""What a chat request says, whichever format spells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Conversation:
    """The messages and what belongs to them, in OpenAI's shapes, with the content of every message as one string.

    ``tools`` are objects ``{"type": "function", "function": {"name", "description"?, "parameters"?}}``. ``thinking``
    None leaves it to the format. ``response_schema`` is a JSON schema that the prompt tells of, if the format does.
    ``variables`` are those of a chat template. With ``continue_final_message`` the answer goes on where the last
    message ends; else ``add_generation_prompt`` begins a new one.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool | None = None
    reasoning_effort: str | None = None
    response_schema: Mapping[str, Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
