"""From a chat request to a conversation, and what of it this model's chat format cannot say."""

from __future__ import annotations

from typing import Any

from server.api.errors import InvalidRequest
from server.api.fields import ignored_fields
from server.api.schemas import ChatCompletionRequest
from server.chat.answer import AnswerSyntax
from server.chat.conversation import Conversation
from server.chat.deepseek_v4 import EFFORTS
from server.chat.formats import ChatFormat, DeepseekV4Format, Prompt

_CALLS = ("tool_calls", "function_call")
"""What an assistant did instead of saying something; a conversation without it is another one."""
_THINKING = ("thinking", "enable_thinking")
"""What clients call the variable of a template that says whether to think."""


def check_chat(body: ChatCompletionRequest, chat: ChatFormat) -> list[str]:
    """What the request says to a chat format that does not read it, the first few names.

    :raises InvalidRequest: an answer that leaves it out is not the answer to this conversation; or a role that the
        format does not tell from the others: such a message would stand in the prompt as if the user had said it.
    """
    if not body.add_generation_prompt and not chat.reads_generation_prompt:
        raise _unsupported("add_generation_prompt", "add_generation_prompt: false", "does not read it")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise InvalidRequest("continue_final_message", "continue_final_message: the last message is no assistant's.")
    _check_tools(body, chat)
    ignored = _check_thinking(body, chat)
    extra = {name: value for message in body.messages for name, value in message.extra.items()}
    for name in _CALLS:
        if name in extra and not chat.reads(name):
            raise _unsupported("messages", f"messages: {name}", "does not read it")
    for role in {message.role for message in body.messages}:
        if not chat.knows_role(role):
            message = f"messages: the chat format of this model does not know the role {role[:60]!r}."
            raise InvalidRequest("messages", message, code="unknown_role")
    kwargs = ignored_fields(body.chat_template_kwargs or {}, (), "chat_template_kwargs.")
    # Results are in the order of their calls also for a format that does not read which is whose.
    names = [*kwargs, *ignored_fields(extra, ("tool_call_id",), "messages.")]
    return [*ignored, *(name for name in names if not chat.reads(name.rpartition(".")[2]))]


def _check_tools(body: ChatCompletionRequest, chat: ChatFormat) -> None:
    if body.forced_calls is None and not body.offers_tools:
        return
    if not chat.takes_tools:
        raise _unsupported("tools", "tools", "does not read them")
    if chat.tools is None:
        raise _unsupported("tools", "tools", "has no parser for their calls: start the server with --tool-parser")


def _check_thinking(body: ChatCompletionRequest, chat: ChatFormat) -> list[str]:
    """Names what is not read of an effort, and refuses thinking where nothing can ask for it."""
    effort = body.reasoning_effort
    if body.thinking is not None and body.thinking["type"] == "enabled" and not chat.takes_thinking:
        raise _unsupported("thinking", "thinking", "does not read it")
    if effort not in (None, "none") and not chat.takes_effort:
        if not chat.takes_thinking:
            raise _unsupported("reasoning_effort", "reasoning_effort", "does not read it")
        return ["reasoning_effort"]
    return ignored_fields(body.thinking or {}, ("type",), "thinking.")


def conversation_of(body: ChatCompletionRequest, chat: ChatFormat) -> Conversation:
    """What the request says.

    :raises InvalidRequest: a variable has a value that the chat format cannot take.
    """
    kwargs = body.chat_template_kwargs or {}
    if isinstance(chat, DeepseekV4Format):
        _check_variables(kwargs)
    return Conversation(
        messages=[message.for_template() for message in body.messages],
        tools=(body.tools or ()) if body.offers_tools else (),
        thinking=_thinking(body, kwargs),
        reasoning_effort=body.reasoning_effort or kwargs.get("reasoning_effort"),
        response_schema=_response_schema(body.response_format),
        variables=kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def answer_syntax(body: ChatCompletionRequest, chat: ChatFormat, prompt: Prompt) -> AnswerSyntax:
    """What is looked for in the request's answers."""
    forced = body.forced_calls
    is_one_call = body.parallel_tool_calls is False or (forced is not None and not forced.is_parallel)
    return AnswerSyntax(
        reasoning=None if body.separate_reasoning is False else chat.reasoning,
        tools=chat.tools if body.offers_tools else None,
        starts_in_reasoning=prompt.starts_in_reasoning,
        has_ended_reasoning=prompt.has_ended_reasoning,
        hides_reasoning=body.include_reasoning is False,
        whole_reasoning=body.stream_reasoning is False,
        max_calls=1 if is_one_call else None,
    )


def _response_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema that is asked for; what is wrong with it is found when it is made a grammar."""
    inner = (response_format or {}).get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    return schema if isinstance(schema, dict) else None


def _thinking(body: ChatCompletionRequest, kwargs: dict[str, Any]) -> bool | None:
    """Whether to think: what the variables say, or the field ``thinking``, or that an effort is asked for."""
    for name in _THINKING:
        if isinstance(value := kwargs.get(name), bool):
            return value
    if body.thinking is not None:
        return bool(body.thinking["type"] == "enabled")
    return None if body.reasoning_effort is None else body.reasoning_effort != "none"


def _check_variables(kwargs: dict[str, Any]) -> None:
    for name in _THINKING:
        if not isinstance(kwargs.get(name), bool | None):
            raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs.{name}: must be true or false.")
    effort = kwargs.get("reasoning_effort")
    if not isinstance(effort, str | None) or effort not in EFFORTS:
        efforts = ", ".join(str(name) for name in EFFORTS if name is not None)
        raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs.reasoning_effort: is none of {efforts}.")


def _unsupported(param: str, what: str, why: str) -> InvalidRequest:
    message = f"{what} is not supported: the chat format of this model {why}."
    return InvalidRequest(param, message, code="unsupported")
