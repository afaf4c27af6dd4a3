"""What an answer must look like, as plain data: a grammar's kind and its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_GRAMMAR_CHARS = 1 << 16
"""The longest text of a grammar: what reading it costs follows its length."""
GrammarKind = Literal["json_schema", "regex", "lark"]


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
