"""From the items of a response's input to the messages of a conversation."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.chat_fields import MAX_CALLS
from server.api.fields import ignored_fields
from server.api.schemas import MAX_MESSAGES, ChatMessage

ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text")
_KNOWN = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
    "reasoning": ("type", "content", "summary", "id", "status"),
}
"""What is read of an item, and what says nothing about the conversation."""


@dataclass(frozen=True)
class ResponseInput:
    """``messages`` in the shape of chat completions, and the ``ignored`` fields of the items, by name."""

    messages: list[ChatMessage]
    ignored: list[str] = field(default_factory=list)


def parse_input(value: Any) -> ResponseInput:
    """What a conversation is made of: a text of the user, or items. What an assistant has done between two others'
    items (reasoning, a text, calls) is one message.

    :raises ValueError: says which item is wrong.
    """
    if isinstance(value, str):
        return ResponseInput([ChatMessage(role="user", content=value)])
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(f"the list has {len(value)} items: 1 to {MAX_MESSAGES} are allowed")
    messages: list[dict[str, Any]] = []
    ignored: dict[str, None] = {}
    for which, item in enumerate(value):
        try:
            _add(item, messages)
        except ValueError as error:
            raise ValueError(f"item {which}: {error}") from None
        known = _KNOWN[item.get("type") or "message"]
        given = {name: value for name, value in item.items() if value is not None}
        ignored |= dict.fromkeys(ignored_fields(given, known, "input."))
    return ResponseInput([ChatMessage(**message) for message in messages], list(ignored))


def _add(item: Any, messages: list[dict[str, Any]]) -> None:
    """Makes ``item`` a message, or a part of the last one."""
    if not isinstance(item, dict):
        raise ValueError("is not an object")
    kind = item.get("type") or "message"
    add = _ADD.get(kind) if isinstance(kind, str) else None
    if add is None:
        raise ValueError(f"items of type {reprlib.repr(kind)} are not supported: {', '.join(_ADD)} are")
    add(item, messages)


def _add_message(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise ValueError(f"the role {reprlib.repr(role)} is none of {', '.join(ROLES)}")
    content = _content(content, "content")
    if role == "assistant":
        _turn(messages, lambda turn: turn["content"] is None)["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("a function_call needs the name of a function")
    if not isinstance(arguments, str):
        raise ValueError("the arguments of a function_call are JSON text")
    call = {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}
    calls = _turn(messages, lambda turn: True).setdefault("tool_calls", [])
    if len(calls) == MAX_CALLS:
        raise ValueError(f"is one of more than {MAX_CALLS} calls in a row")
    calls.append(call)


def _add_output(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    message = {"role": "tool", "tool_call_id": _call_id(item), "content": _content(item.get("output"), "output")}
    messages.append(message)


def _add_reasoning(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    """Its summary is told of nowhere: no model has written it."""
    content = item.get("content")
    if content is None:
        return
    if not isinstance(content, list):
        raise ValueError("the content of a reasoning item is a list of parts")
    text = "\n".join(_text(part, ("reasoning_text",)) for part in content)
    if text:
        _turn(messages, lambda turn: False)["reasoning_content"] = text


_ADD: Mapping[str, Callable[[Mapping[str, Any], list[dict[str, Any]]], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
}


def _turn(messages: list[dict[str, Any]], goes_on: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last, if it is one and ``goes_on``, or else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or not goes_on(messages[-1]):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call_id(item: Mapping[str, Any]) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise ValueError(f"a {item['type']} needs the call_id of its call")
    return call_id


def _content(content: Any, name: str) -> str | list[dict[str, str]]:
    """A text, or parts of it in the shape of chat completions."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the {name} must be a string or a list of parts")
    return [{"type": "text", "text": _text(part, _TEXTS)} for part in content]


def _text(part: Any, types: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in types:
        raise ValueError(f"parts of type {reprlib.repr(kind)} are not supported: only {' and '.join(types)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind} needs a string in its text field")
    return text
