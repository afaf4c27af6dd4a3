"""What a client may send to ``POST /v1/responses``: OpenAI's fields, brought to those of chat completions.

Beside OpenAI's own fields all sampling fields of the other routes are honoured, and the rooms that routers name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from server.api.chat_fields import MAX_TOOLS, Effort, check_tools
from server.api.errors import InvalidRequest
from server.api.fields import (
    HARMLESS_IN_RESPONSES,
    REFUSED_IN_REASONING,
    REFUSED_IN_RESPONSES,
    REFUSED_IN_TEXT,
    Harmless,
    ignored_fields,
    refuse_unsupported,
)
from server.api.responses_input import ResponseInput, parse_input
from server.api.schemas import ChatCompletionRequest, ChatMessage, GenerationFields

MAX_METADATA = 16
MAX_INCLUDED = 64
_LOGPROBS = "message.output_text.logprobs"
_ITEMS: dict[str, Any] = {"type": "array", "items": {"type": "object"}, "minItems": 1}


def _parse_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the shape of chat completions, which have the function's fields in an object of their own."""
    nested = []
    for which, tool in enumerate(tools):
        if tool.get("type") != "function":
            kind = reprlib.repr(tool.get("type"))
            raise ValueError(f"tool {which} is of type {kind}: only tools of type 'function' are supported")
        if "function" in tool:
            raise ValueError(f"tool {which} has a field function: here name and parameters stand beside the type")
        function = {name: value for name, value in tool.items() if name != "type"}
        nested.append({"type": "function", "function": function})
    return check_tools(nested)


def _parse_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice in (None, "none", "auto", "required"):
        return choice
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise ValueError("must be 'none', 'auto', 'required', or an object {\"type\": \"function\", \"name\": ...}")
    return {"type": "function", "function": {"name": name}}


class ResponseReasoning(BaseModel):
    """The field ``reasoning``. A summary, which clients may ask for, is not made."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: Effort | None = None

    @model_validator(mode="after")
    def _refuse(self) -> ResponseReasoning:
        refuse_unsupported(self.model_extra or {}, REFUSED_IN_REASONING, "reasoning.")
        return self


class ResponseText(BaseModel):
    """The field ``text``. What is wrong with a format is found when it is made a grammar."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse(self) -> ResponseText:
        refuse_unsupported(self.model_extra or {}, REFUSED_IN_TEXT, "text.")
        return self

    @property
    def response_format(self) -> dict[str, Any] | None:
        """``format`` as chat completions have it: a schema in an object of its own."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        inner = {name: value for name, value in self.format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}


class ResponsesRequest(GenerationFields):
    """``POST /v1/responses``."""

    refused: ClassVar[Mapping[str, Harmless]] = REFUSED_IN_RESPONSES

    input: Annotated[
        ResponseInput, PlainValidator(parse_input), WithJsonSchema({"anyOf": [{"type": "string"}, _ITEMS]})
    ]
    instructions: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="max_output_tokens")
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_parse_tools)]
        | None
    ) = None
    tool_choice: Annotated[str | dict[str, Any] | None, AfterValidator(_parse_choice)] = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _check_include(self) -> ResponsesRequest:
        if _LOGPROBS in (self.include or ()):
            raise InvalidRequest(
                "include", f"include: {_LOGPROBS} is not supported by this server.", code="unsupported"
            )
        return self

    @property
    def ignored(self) -> list[str]:
        """Names of what the request says without effect, the first few. That nothing is kept is named if it is asked to
        be kept in so many words.
        """
        names = [name for name in super().ignored if name not in HARMLESS_IN_RESPONSES]
        names += ["store"] if self.store else []
        names += ignored_fields(dict.fromkeys(self.include or ()), (), "include.")
        if self.reasoning is not None:
            names += ignored_fields(_given(self.reasoning), REFUSED_IN_REASONING, "reasoning.")
        if self.text is not None:
            names += ignored_fields(_given(self.text), REFUSED_IN_TEXT, "text.")
        return [*names, *self.input.ignored]

    def chat_request(self) -> ChatCompletionRequest:
        """The same request as chat completions see it. Everything in it has been checked here."""
        instructions = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        shared = {name: getattr(self, name) for name in GenerationFields.model_fields}
        own = {
            "messages": [*instructions, *self.input.messages],
            "response_format": None if self.text is None else self.text.response_format,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return _ChatOfResponse.model_construct(**shared | own)

    def echo(self) -> dict[str, Any]:
        """What the answer repeats of the request, in its own shape."""
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "name": choice["function"]["name"]}
        effort = None if self.reasoning is None else self.reasoning.effort
        text_format = None if self.text is None else self.text.format
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": choice or "auto",
            "tools": [{"type": "function", **tool["function"]} for tool in self.tools or ()],
            "user": self.user,
        }


class _ChatOfResponse(ChatCompletionRequest):
    @property
    def max_tokens_field(self) -> str:
        return "max_output_tokens"


def _given(model: BaseModel) -> dict[str, Any]:
    """The fields that ``model`` does not know and that say something."""
    return {name: value for name, value in (model.model_extra or {}).items() if value is not None}
