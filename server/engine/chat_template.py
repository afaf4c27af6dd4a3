"""The chat template of a model directory: Jinja, with the names and rules that ``transformers`` gives to templates."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.failure import Failure, RequestFailed

log = logging.getLogger(__name__)

CALL_ARGUMENTS = frozenset(
    {
        *("self", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("messages", "conversations", "raise_exception", "strftime_now", "tojson"),
    }
)
"""Names that no client may set: arguments of transformers' ``apply_chat_template``, and what every template gets."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""A message's reasoning has one of these names; the first that it has is the value of the first two."""
_END_OF_CONTENT = "zq-end-of-the-last-content"
_NO_ROLE = "zq-no-role-of-any-template"
_MAX_REASON_CHARS = 500


class ChatTemplate:
    """One Jinja ``source`` (None: the model has no template). ``special_tokens`` are variables that it sees, by name.

    It renders what ``apply_chat_template`` of transformers renders, for messages and variables that came as JSON.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source or ""
        self._special_tokens = dict(special_tokens)

    def reads(self, name: str) -> bool:
        """Whether the template names the variable or message field ``name``, or takes messages as a whole.

        A template that does not cannot say anything else because of it.
        """
        return re.search(rf"\b({re.escape(name)}|tojson|items|values)\b", self.source) is not None

    def knows_role(self, role: str) -> bool:
        """Whether the template marks messages of this role: it names the role, or writes the name of any role.

        One that does neither would paste such a message like one of the user, who needs no mark.
        """
        if role == "user":
            return True
        return any(quote + role + quote in self.source for quote in "'\"") or self._minds_roles

    @cached_property
    def _minds_roles(self) -> bool:
        """Whether the template writes, or refuses itself, a role that it cannot know."""
        messages = [{"role": "user", "content": "a"}, {"role": _NO_ROLE, "content": "b"}]
        try:
            return _NO_ROLE in self._rendered(messages, {}, add_generation_prompt=False)
        except Exception:  # noqa: BLE001  (a template may raise anything; it will again, and the client gets the error)
            return True

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation; with ``continue_final_message`` up to the end of the last message's content.

        :raises RequestFailed: 400 ``no_chat_template``, ``invalid_chat_template_kwargs`` (a name of
            :data:`CALL_ARGUMENTS` or of a special token) or ``chat_template_error`` (the template cannot take the
            messages).
        """
        if not self.source:
            reason = (
                "This model has no chat template: use /v1/completions, or give its directory a chat_template.jinja."
            )
            raise RequestFailed(Failure("no_chat_template", reason))
        reserved = sorted((CALL_ARGUMENTS | self._special_tokens.keys()) & variables.keys())
        if reserved:
            raise RequestFailed(
                Failure("invalid_chat_template_kwargs", f"chat_template_kwargs may not set {', '.join(reserved)}.")
            )
        try:
            if continue_final_message:
                return self._rendered_to_the_last_content(messages, variables, tools)
            return self._rendered(messages, variables, tools=tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # whatever a template does with these values, they are the client's
            log.debug("the chat template failed: %r", error)
            reason = str(error)[:_MAX_REASON_CHARS]
            raise RequestFailed(
                Failure("chat_template_error", f"The chat template refused these messages: {reason}")
            ) from error

    def _rendered_to_the_last_content(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """The template says where the last message ends; a mark behind its content says where that is."""
        last = messages[-1] if messages else {}
        marked = [*messages[:-1], {**last, "content": last.get("content", "") + _END_OF_CONTENT}]
        text = self._rendered(marked, variables, tools=tools, add_generation_prompt=False)
        begin, mark, _ = text.rpartition(_END_OF_CONTENT)
        if not mark:
            raise ValueError("the last message's content is not in what the template writes: it cannot be continued")
        return begin

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        if not messages:
            raise ValueError("a conversation has at least one message")
        return self._compiled.render(
            **self._special_tokens,
            **variables,
            messages=[_as_templates_expect(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_DictMaker(), namespace=_Namespace
        )
        return environment.from_string(self.source)


def _as_templates_expect(message: dict[str, Any]) -> dict[str, Any]:
    """Without fields that are null, which many templates would print, and with the reasoning under its usual names."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING_FIELDS if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training. Here it is a scope and nothing more."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _DictMaker:
    """``dict`` in a template: makes dictionaries, and has none of the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` in a template. Attributes with an underscore in front are refused: Python's own are behind them."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have the attribute {name!r}: it begins with _")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
