"""The chat format of DeepSeek-V4, which its checkpoints have no template for: a conversation as the text of a prompt.

The package ``deepseek-recipe`` by DeepSeek spells turns, tools and results. Beside it the rules of the checkpoint's own
``encoding_dsv4.py`` hold where the package has other ones: what an effort writes, that there is no reasoning outside of
thinking, and roles and tasks that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import deepseek_recipe as recipe

from server.chat.conversation import Conversation
from server.failure import Failure, RequestFailed

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")
EFFORTS: Mapping[str | None, Literal["low", "high"]] = {
    **dict.fromkeys((None, "minimal", "low", "medium", "high"), "low"),
    **dict.fromkeys(("xhigh", "max"), "high"),
}
"""A request's effort, and the package's name for the text that the checkpoint has for it: none, or that of ``max``."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""A message's reasoning has one of these names."""
TASKS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""A user's message with one of these as its ``task`` asks for a classification, not for an answer."""

_USERS = ("user", "developer", "tool")
"""Roles whose messages are turns of the user."""


def render(conversation: Conversation) -> str:
    """The prompt of ``conversation``, from BOS to ``<think>`` or ``</think>``.

    :raises RequestFailed: 400 ``unknown_role``, ``invalid_value`` for a message that cannot be spelled, or
        ``invalid_text``.
    """
    try:
        return _render(conversation)
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        code = "invalid_text" if isinstance(error, UnicodeEncodeError) else "invalid_value"
        reason = f"messages or tools cannot be spelled for this model: {str(error)[:200]}"
        raise RequestFailed(Failure(code, reason), param="messages") from error


def _render(conversation: Conversation) -> str:
    messages = conversation.messages
    thinking = bool(conversation.thinking)
    keeps_reasoning = bool(conversation.tools) or any(message.get("tools") for message in messages)
    if thinking and not keeps_reasoning:
        messages = _without_old_developers(messages)
    ends_with_assistant = bool(messages) and messages[-1]["role"] == "assistant"
    is_open = ends_with_assistant and (conversation.continue_final_message or not conversation.add_generation_prompt)
    own_tools = [tool for message in messages for tool in message.get("tools") or ()]
    spelled = [
        _message(messages, i, thinking, keeps_reasoning, is_open and i == len(messages) - 1)
        for i in range(len(messages))
    ]
    prompt = _prompt(
        spelled,
        conversation.tools or own_tools,
        thinking=thinking,
        reasoning_effort=EFFORTS.get(conversation.reasoning_effort, "low"),
        response_schema=conversation.response_schema,
    )
    if own_tools and not conversation.tools:
        prompt = _without_system_tools(prompt, spelled, own_tools, thinking, conversation.reasoning_effort)
    if is_open:
        return prompt if conversation.continue_final_message else prompt + EOS
    suffix = ASSISTANT + (THINK if thinking else END_THINK)
    if not conversation.add_generation_prompt:
        return prompt.removesuffix(suffix)
    task = messages[-1].get("task") if messages else None
    if task is None:
        return prompt
    return prompt + TASKS[task] if task == "action" else prompt.removesuffix(suffix) + TASKS[task]


def _prompt(messages: Sequence[recipe.Message], tools: Sequence[Mapping[str, Any]], **settings: Any) -> str:
    conversation = recipe.Conversation(
        messages,
        thinking_mode=settings["thinking"],
        tools=[_tool(tool) for tool in tools],
        reasoning_effort=settings["reasoning_effort"],
        response_schema=settings["response_schema"],
    )
    return recipe.DeepseekV4Encoding().render_conversation(conversation).prompt


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """How a prompt describes ``tools``, with the empty line in front of it."""
    prompt = _prompt([], tools, thinking=False, reasoning_effort="low", response_schema=None)
    return prompt.removeprefix(BOS).removesuffix(ASSISTANT + END_THINK)


def _message(
    messages: Sequence[Mapping[str, Any]], i: int, thinking: bool, keeps_reasoning: bool, is_open: bool
) -> recipe.Message:
    message = messages[i]
    role, content = message["role"], message.get("content") or ""
    if role == "user":
        return recipe.UserMessage(content + _mid_task(messages, i))
    if role == "developer":
        tools = message.get("tools")
        return recipe.UserMessage(content + (tools_text(tools) if tools else ""))
    if role == "system":
        return recipe.SystemMessage(content)
    if role == "tool":
        return recipe.ToolMessage(content, message.get("tool_call_id"))
    if role == "latest_reminder":
        return recipe.LatestReminderMessage(content)
    if role != "assistant":
        reason = f"messages: the chat format of this model does not know the role {role[:60]!r}."
        raise RequestFailed(Failure("unknown_role", reason), param="messages")
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None) if thinking else None
    if i and messages[i - 1].get("task") == "action":
        content, reasoning = TASKS["action"] + content, None
    elif thinking and (keeps_reasoning or is_open):
        reasoning = reasoning or ""  # else the package would write that there was no thinking
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return recipe.AssistantMessage(content, reasoning, calls or None, prefix=is_open)


def _mid_task(messages: Sequence[Mapping[str, Any]], i: int) -> str:
    """Checks the task of a user's message; one that was answered already can only be an action."""
    task = messages[i].get("task")
    if task is None:
        return ""
    if task not in TASKS:
        raise ValueError(f"the task {str(task)[:60]!r} is none of {', '.join(TASKS)}")
    if task != "action" and i + 1 < len(messages):
        raise ValueError(f"the task {task} must be in the last message")
    return ""


def _call(call: Mapping[str, Any]) -> recipe.ToolCall:
    function = call["function"]
    return recipe.ToolCall(call.get("id") or "", function["name"], function.get("arguments") or "")


def _tool(tool: Mapping[str, Any]) -> recipe.ToolDefinition:
    function = tool["function"]
    return recipe.ToolDefinition(function["name"], function.get("description"), function.get("parameters") or {})


def _without_old_developers(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """With the reasoning of earlier turns go the messages of a developer before the last turn of the user."""
    last = max((i for i, message in enumerate(messages) if message["role"] in _USERS), default=-1)
    return [message for i, message in enumerate(messages) if i >= last or message["role"] != "developer"]


def _without_system_tools(
    prompt: str,
    messages: Sequence[recipe.Message],
    tools: Sequence[Mapping[str, Any]],
    thinking: bool,
    effort: str | None,
) -> str:
    """``prompt`` without the description of tools behind the system's messages: it stands in a developer's."""
    systems = [message for message in messages if message.role == "system"]
    before = _prompt(systems, [], thinking=thinking, reasoning_effort=EFFORTS.get(effort, "low"), response_schema=None)
    n_before = len(before.removesuffix(ASSISTANT + (THINK if thinking else END_THINK)))
    return prompt[:n_before] + prompt[n_before:].removeprefix(tools_text(tools))
