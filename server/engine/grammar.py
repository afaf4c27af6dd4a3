"""What an answer must look like, as plain data: a grammar's kind and its text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_GRAMMAR_CHARS = 1 << 16
"""The longest text of a grammar: what reading it costs follows its length."""
MAX_EBNF_CHARS = 1 << 14
"""The longest grammar in another notation, which is converted first, by slower code."""
JSON_WHITESPACE = r"(\n {0,16}| )?"
"""Between the parts of a JSON text there is at most a space, or a line break and an indent: a model that does not know
how to go on would otherwise write white space without end.
"""
_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
"""What tells Lark from GBNF, as ``llguidance`` has it. Its own expression costs the square of a run of empty lines,
with the interpreter's lock: over a second for the longest text.
"""
GrammarKind = Literal["json_schema", "regex", "lark"]


def check_length(text: str) -> None:
    """:raises ValueError: the text of a grammar, in its own notation or as it is compiled, is too long."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar has {len(text)} characters: at most {MAX_GRAMMAR_CHARS} are allowed")


@dataclass(frozen=True)
class Grammar:
    """The whole answer has to match ``text``: a JSON schema (as JSON), a regular expression, or a grammar in the Lark
    dialect of ``llguidance``, which may name special tokens (``<[128821]>`` or ``<|name|>``).
    """

    kind: GrammarKind
    text: str

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """A grammar in GBNF (that of llama.cpp) or in Lark. Raises :class:`ValueError` for one that is neither."""
        if len(text) > MAX_EBNF_CHARS:
            raise ValueError(f"the grammar has {len(text)} characters: at most {MAX_EBNF_CHARS} are allowed")
        try:
            return cls("lark", text if _LARK.search(text) is not None else gbnf_to_lark(text))
        except Exception as error:
            raise ValueError(f"not a grammar in GBNF: {error}") from error
