"""What a chat request says beside its messages: tools, thinking, and how the answer is shown."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from server.api.errors import InvalidRequest
from server.chat.formats import ForcedCalls

MAX_TOOLS = 128
MAX_TOOL_CHARS = 1 << 18
"""Characters of all names, texts and keys of a request's tools."""
MAX_TOOL_VALUES = 1 << 13
"""Values and keys of all tools."""
MAX_TOOL_DEPTH = 32
"""Objects and lists inside each other in one tool."""
MAX_CALLS = 1024
"""Calls in one message."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a request, in the shape of chat completions.

    :raises ValueError: says what is wrong, or too large.
    """
    n_values = n_chars = 0
    for which, tool in enumerate(tools):
        for depth, value in _values(tool):
            n_values += 1
            n_chars += len(value) if isinstance(value, str) else 0
            if depth > MAX_TOOL_DEPTH:
                raise ValueError(
                    f"tool {which} has objects and lists more than {MAX_TOOL_DEPTH} deep inside each other"
                )
            if n_values > MAX_TOOL_VALUES or n_chars > MAX_TOOL_CHARS:
                raise ValueError(
                    f"the tools are too large: at most {MAX_TOOL_VALUES} values and {MAX_TOOL_CHARS} characters"
                )
        _check_tool(which, tool)
    return tools


def _values(tool: Any) -> Iterator[tuple[int, Any]]:
    """Every value and key of a tool, with its depth. What was not looked at yet costs nothing."""
    waiting: list[tuple[int, Iterator[Any]]] = [(1, iter((tool,)))]
    while waiting:
        depth, values = waiting[-1]
        for value in values:
            yield depth, value
            if isinstance(value, dict | list):
                parts = iter(value) if isinstance(value, list) else (part for item in value.items() for part in item)
                waiting.append((depth + 1, parts))
                break
        else:
            waiting.pop()


def _check_tool(which: int, tool: Mapping[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError(f"tool {which} is no function: only tools of type 'function' are supported")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"tool {which}: the name of a function has 1 to 128 letters, digits, and _ . : -, not {reprlib.repr(name)}"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise ValueError(f"tool {which}: the description is not a string")
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(f"tool {which}: the parameters are not a JSON schema, which is an object")


def _check_choice(choice: Any) -> Any:
    if choice in (None, "none", "auto", "required"):
        return choice
    function = (
        choice.get("function") if isinstance(choice, dict) and choice.get("type", "function") == "function" else None
    )
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            'must be \'none\', \'auto\', \'required\', or an object {"type": "function", "function": {"name": ...}}'
        )
    return choice


def check_calls(calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The calls of an assistant's message, with arguments as JSON text.

    :raises ValueError: says what is wrong.
    """
    if calls is None:
        return None
    checked = []
    for which, call in enumerate(calls):
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise ValueError(f"call {which} is no call of a function")
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            raise ValueError(f"call {which} has no name of a function")
        if not isinstance(call.get("id", ""), str | None):
            raise ValueError(f"call {which}: the id is not a string")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str | None):
            raise ValueError(f"call {which}: the arguments are no JSON text")
        checked.append({**call, "type": "function", "function": {**function, "arguments": arguments or ""}})
    return checked


def _check_thinking(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    if thinking is not None and thinking.get("type") not in ("enabled", "disabled"):
        raise ValueError('must be {"type": "enabled"} or {"type": "disabled"}')
    return thinking


class ChatFields(BaseModel):
    """Fields of chat completions alone. None means: the default."""

    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_tools)] | None
    ) = None
    tool_choice: Annotated[str | dict[str, Any] | None, AfterValidator(_check_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Annotated[dict[str, Any] | None, AfterValidator(_check_thinking)] = None
    separate_reasoning: bool | None = None
    """False: the answer's content has everything as the model wrote it."""
    stream_reasoning: bool | None = None
    """False: a stream has the reasoning in one piece."""
    include_reasoning: bool | None = None
    """False: the reasoning is left out."""
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None

    @property
    def offers_tools(self) -> bool:
        """Whether the answer may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_calls(self) -> ForcedCalls | None:
        """Which calls the answer has to make, if any.

        :raises InvalidRequest: ``tool_choice`` names no tool of the request.
        """
        choice, tools = self.tool_choice, self.tools or []
        if choice in (None, "none", "auto"):
            return None
        if choice == "required":
            if not tools:
                raise InvalidRequest("tool_choice", "tool_choice 'required' needs tools.")
            return ForcedCalls(tools, is_parallel=self.parallel_tool_calls is not False)
        assert isinstance(choice, dict)
        name = choice["function"]["name"]
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            raise InvalidRequest("tool_choice", f"tool_choice: {reprlib.repr(name)} is none of the request's tools.")
        return ForcedCalls(named[:1], is_parallel=False)
