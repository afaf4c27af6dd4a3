"""Grammars of answers that think first, in the Lark dialect of ``llguidance``."""

from __future__ import annotations

import json
import re

from server.engine.grammar import JSON_WHITESPACE, Grammar


def reasoning_rule(tag: str, token_id: int | None) -> str:
    """The rule ``reasoning`` of a grammar: any text up to ``tag``, which is a token, or else a text."""
    if token_id is not None:
        return f"reasoning: TEXT? <[{token_id}]>\nTEXT: /(?s:.+)/"
    return f"reasoning[lazy]: /(?s:.*){escaped(tag)}/"


def behind_reasoning(rule: str, grammar: Grammar) -> Grammar:
    """``grammar`` for what follows the reasoning. What it costs follows the grammar's length."""
    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.text)
            answer = "%json " + json.dumps(
                {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}, ensure_ascii=False
            )
        case "regex":
            answer = f"/{_in_slashes(grammar.text)}/"
        case "lark":
            answer = f"%lark {{\n{grammar.text}\n}}"
    return Grammar("lark", f"start: reasoning answer\n{rule}\nanswer: {answer}")


def escaped(text: str) -> str:
    """A regular expression between slashes for ``text`` itself."""
    return re.sub(r"([\\/.^$*+?()\[\]{}|-])", r"\\\1", text).replace("\n", "\\n")


def _in_slashes(regex: str) -> str:
    """``regex`` without a bare slash or line break."""
    slashes = re.sub(r"(?s)\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], regex)
    return slashes.replace("\n", "\\n")
