"""Grammars for answers that have to call a tool, in the Lark dialect of ``llguidance``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.chat.dsml import CALLS, END_CALLS, END_INVOKE, END_PARAMETER, INVOKE, PARAMETER
from server.chat.hermes import BEGIN, END
from server.chat.reasoning_grammar import escaped
from server.engine.grammar import MAX_GRAMMAR_CHARS
from server.failure import Failure, RequestFailed

_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_PLAIN_SCHEMA = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"),
        *("title", "description", "default", "examples", "$comment", "deprecated", "strict"),
    }
)
"""Keywords of schemas whose parameters can be written one after the other."""
_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_TEXT = r"([^<]|<[^｜\/]|<\/[^｜])*"
"""Any text in which no tag of DSML begins."""


def dsml_grammar(tools: Sequence[Mapping[str, Any]], is_parallel: bool, reasoning: str | None) -> str:
    """One call of one of ``tools``, or more if ``is_parallel``, as DSML. ``reasoning`` is the rule for the reasoning
    before it, of :func:`.reasoning_rule`; None: there is none.

    Parameters come in the order of their schema, those that are not required or are left out. A text without conditions
    is written as it is, any other value as JSON.

    :raises RequestFailed: 400 ``unsupported``: a tool's parameters are no plain object, or too many.
    """
    rules = _begin(is_parallel, reasoning, _literal(f"\n\n{CALLS}\n"), _literal(END_CALLS), len(tools))
    n_chars = 0
    for i, tool in enumerate(tools):
        name, schema = _function(tool)
        parts = [_literal(f'{INVOKE} name="{name}">\n')]
        for k, (key, value, is_required) in enumerate(_properties(name, schema)):
            parts.append(f"p{i}_{k}" + ("" if is_required else "?"))
            rules.append(f"p{i}_{k}: {_parameter(key, value)}")
            n_chars += len(rules[-1])  # a definition counts as often as it is referred to
            if n_chars > MAX_GRAMMAR_CHARS:
                raise _not_forced(name, f"its grammar has more than {MAX_GRAMMAR_CHARS} characters")
        rules.append(f"call{i}: {' '.join(parts)} {_literal(END_INVOKE + chr(10))}")
    return "\n".join(rules)


def hermes_grammar(tools: Sequence[Mapping[str, Any]], is_parallel: bool, reasoning: str | None) -> str:
    """As :func:`dsml_grammar`, as JSON between the tags of Hermes. Any schema will do."""
    rules = _begin(is_parallel, reasoning, "", "", len(tools))
    for i, tool in enumerate(tools):
        name, schema = _function(tool)
        begin = _literal(f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ')
        arguments = _json({"type": "object"} | dict(schema))
        rules.append(f"call{i}: {begin} {arguments} {_literal(f'}}{chr(10)}{END}{chr(10)}')}")
    return "\n".join(rules)


def _begin(is_parallel: bool, reasoning: str | None, begin: str, end: str, n_tools: int) -> list[str]:
    calls = "(" + " | ".join(f"call{i}" for i in range(n_tools)) + ")" + ("+" if is_parallel else "")
    answer = " ".join(part for part in (begin, calls, end) if part)
    return [f"start: {answer}"] if reasoning is None else [f"start: reasoning {answer}", reasoning]


def _function(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = tool["function"]
    return function["name"], function.get("parameters") or {}


def _properties(name: str, schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Key, schema, and whether it is required, of every parameter."""
    schema = _resolved(schema)
    unknown = sorted(schema.keys() - _PLAIN_SCHEMA)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    is_plain = schema.get("type", "object") == "object" and isinstance(properties, dict) and isinstance(required, list)
    if unknown or not is_plain or any(not re.fullmatch(r'[^"<>\n]+', key) for key in properties):
        what = f"they have {unknown[0][:60]!r}" if unknown else "they are no object with names that can be written"
        raise _not_forced(name, what)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names = dict.fromkeys([*properties, *(key for key in required if isinstance(key, str))])
    found = []
    for key in names:
        value = properties.get(key, {})
        value = dict(value) if isinstance(value, dict) else {}
        found.append((key, value | shared if "$ref" in json.dumps(value) else value, key in required))
    return found


def _not_forced(name: str, why: str) -> RequestFailed:
    reason = f"tool_choice: a call of {name} cannot be forced by the schema of its parameters: {why}."
    return RequestFailed(Failure("unsupported", reason), param="tool_choice")


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema``, or what it refers to among its own definitions."""
    parts = str(schema.get("$ref", "")).split("/")
    if len(parts) == 3 and parts[0] == "#" and parts[1] in ("$defs", "definitions"):
        definitions = schema.get(parts[1])
        target = definitions.get(parts[2]) if isinstance(definitions, dict) else None
        if isinstance(target, dict):
            return {**target, parts[1]: schema[parts[1]]}
    return schema


def _parameter(key: str, schema: Mapping[str, Any]) -> str:
    says = {name: value for name, value in schema.items() if name not in _NOTES}
    texts = says.get("enum", [says["const"]] if "const" in says else None)
    begin = f'{PARAMETER} name="{key}" string="true">'
    end = END_PARAMETER + "\n"
    if isinstance(texts, list) and texts and all(isinstance(text, str) and "<" not in text for text in texts):
        return "(" + " | ".join(_literal(begin + text + end) for text in texts) + ")"
    if says == {"type": "string"}:
        return f"/{escaped(begin)}{_TEXT}{escaped(end)}/"
    begin = f'{PARAMETER} name="{key}" string="false">'
    return f"{_literal(begin)} {_json(schema)} {_literal(end)}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
