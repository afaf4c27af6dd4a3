"""The chat formats of this server: how a conversation becomes a prompt, and what is looked for in its answer."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from server.chat import deepseek_v4
from server.chat.answer import ReasoningTags
from server.chat.calls import ToolSyntax
from server.chat.conversation import Conversation
from server.chat.reasoning_grammar import reasoning_rule
from server.engine.grammar import Grammar
from server.engine.request import TokenizerLike


@dataclass(frozen=True)
class ForcedCalls:
    """The answer must call one of ``tools``, or several times if ``is_parallel``."""

    tools: Sequence[Mapping[str, Any]]
    is_parallel: bool


@dataclass(frozen=True)
class Prompt:
    """The text of a prompt with its special tokens, and what it says about the answer.

    ``starts_in_reasoning``: it has begun the reasoning. ``has_ended_reasoning``: it has ended it. ``reasoning_rule`` is
    the part of a grammar for the reasoning that comes first, if any. ``grammar`` is what the answer has to match, if
    calls are forced.
    """

    text: str
    starts_in_reasoning: bool = False
    has_ended_reasoning: bool = False
    reasoning_rule: str | None = None
    grammar: Grammar | None = None


class ChatFormat(ABC):
    """One way to spell conversations. ``tools`` and ``reasoning`` say what is looked for in answers; None: nothing."""

    name: ClassVar[str]

    def __init__(self, tokenizer: TokenizerLike, tools: ToolSyntax | None, reasoning: ReasoningTags | None) -> None:
        self._tokenizer = tokenizer
        self.tools, self.reasoning = tools, reasoning

    @property
    @abstractmethod
    def takes_tools(self) -> bool:
        """Whether a prompt can tell of tools."""

    @property
    @abstractmethod
    def takes_thinking(self) -> bool:
        """Whether a prompt can say whether to think."""

    @property
    @abstractmethod
    def takes_effort(self) -> bool:
        """Whether a prompt can say how much to think."""

    @property
    @abstractmethod
    def reads_generation_prompt(self) -> bool:
        """Whether a prompt can end before the answer begins."""

    @property
    def can_think(self) -> bool:
        """Whether an answer thinks first if it is asked to, and the thoughts are told from the rest."""
        return self.takes_thinking and self.reasoning is not None

    def __str__(self) -> str:
        tools = "no tool parser" if self.tools is None else f"tool parser {self.tools.name}"
        if self.reasoning is None:
            thinking = "no reasoning parser"
        elif self.can_think:
            thinking = "thinks if asked to"
        else:
            thinking = "cannot be asked to think"
        return f"format {self.name}, {tools}, {thinking}"

    @abstractmethod
    def reads(self, name: str) -> bool:
        """Whether a variable or a message's field of this name can change a prompt."""

    @abstractmethod
    def knows_role(self, role: str) -> bool:
        """Whether messages of this role are told from those of the user, or refused when the prompt is written."""

    @abstractmethod
    def render(self, conversation: Conversation) -> Prompt:
        """The prompt, without a grammar.

        :raises RequestFailed: the messages cannot be spelled.
        """

    def prepare(self, conversation: Conversation, forced: ForcedCalls | None) -> Prompt:
        """The prompt, with the grammar of ``forced`` calls. What it costs follows the size of the conversation.

        :raises RequestFailed: as :meth:`render`; 400 ``unsupported`` for calls that no grammar can force.
        """
        prompt = self.render(conversation)
        rule = None
        if prompt.starts_in_reasoning and self.reasoning is not None:
            rule = reasoning_rule(self.reasoning.end, self._tokenizer.token_id(self.reasoning.end))
        grammar = None
        if forced is not None and self.tools is not None:
            grammar = Grammar("lark", self.tools.grammar(forced.tools, forced.is_parallel, rule))
        return replace(prompt, reasoning_rule=rule, grammar=grammar)


class DeepseekV4Format(ChatFormat):
    """That of DeepSeek-V4 checkpoints, which have no template. Without a word about it there is no thinking."""

    name = "deepseek_v4"
    takes_tools = True
    takes_thinking = True
    takes_effort = True
    reads_generation_prompt = True

    def reads(self, name: str) -> bool:
        return name in _V4_NAMES

    def knows_role(self, role: str) -> bool:
        return role in deepseek_v4.ROLES

    def render(self, conversation: Conversation) -> Prompt:
        text = deepseek_v4.render(conversation)
        turn = text[text.rfind(deepseek_v4.ASSISTANT) :]
        begin, end = turn.rfind(deepseek_v4.THINK), turn.rfind(deepseek_v4.END_THINK)
        return Prompt(text, starts_in_reasoning=begin > end, has_ended_reasoning=end > begin)


_V4_NAMES = frozenset(
    {
        *("tool_calls", "tool_call_id", "tools", "task", *deepseek_v4.REASONING_FIELDS),
        *("enable_thinking", "reasoning_effort"),
    }
)
"""Fields of messages, and variables."""


class TemplateFormat(ChatFormat):
    """That of the model directory's chat template."""

    name = "template"

    @property
    def takes_tools(self) -> bool:
        return self._names("tools")

    @property
    def takes_thinking(self) -> bool:
        return any(self._names(name) for name in ("thinking", "enable_thinking"))

    @property
    def takes_effort(self) -> bool:
        return self._names("reasoning_effort")

    @property
    def reads_generation_prompt(self) -> bool:
        return self.reads("add_generation_prompt")

    def _names(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self._tokenizer.chat_template) is not None

    def reads(self, name: str) -> bool:
        return self._tokenizer.template_reads(name)

    def knows_role(self, role: str) -> bool:
        return self._tokenizer.template_knows_role(role)

    def render(self, conversation: Conversation) -> Prompt:
        variables = dict(conversation.variables)
        said = {
            "thinking": conversation.thinking,
            "enable_thinking": conversation.thinking,
            "reasoning_effort": conversation.reasoning_effort,
        }
        for name, value in said.items():
            if value is not None and self._names(name):
                variables.setdefault(name, value)
        text = self._tokenizer.render_chat(
            [_with_parsed_arguments(message) for message in conversation.messages],
            variables,
            add_generation_prompt=conversation.add_generation_prompt,
            tools=list(conversation.tools) or None,
            continue_final_message=conversation.continue_final_message,
        )
        if self.reasoning is None:
            return Prompt(text)
        if conversation.continue_final_message:
            content = str(conversation.messages[-1].get("content", ""))
            is_open = content.rfind(self.reasoning.begin) > content.rfind(self.reasoning.end)
            return Prompt(text, starts_in_reasoning=is_open, has_ended_reasoning=not is_open)
        end = text[-_MAX_END_CHARS:].rstrip()
        return Prompt(text, end.endswith(self.reasoning.begin), end.endswith(self.reasoning.end))


_MAX_END_CHARS = 64
"""Tags and white space at the end of a prompt are shorter."""


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates expect the arguments of a call as an object; a text that is none stays."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    parsed = []
    for call in calls:
        function = dict(call["function"])
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}
