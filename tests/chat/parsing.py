"""What all tests of parsers share: answers read in pieces, and what comes out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from server.chat.answer import AnswerParser, AnswerSyntax
from server.chat.events import CallBegin, Content, Event, Reasoning
from server.chat.registry import REASONING_PARSERS, TOOL_PARSERS

THINKING = REASONING_PARSERS["deepseek"]
DSML, HERMES = TOOL_PARSERS["deepseek_v4"], TOOL_PARSERS["hermes"]


@dataclass
class Answer:
    """All events put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, CallBegin):
                assert event.index == len(self.calls)
                self.calls.append((event.name, ""))
            else:
                assert event.index == len(self.calls) - 1
                name, arguments = self.calls.pop()
                self.calls.append((name, arguments + event.text))


def read(pieces: Iterable[str], *, is_cut: bool = False, **syntax: Any) -> Answer:
    """An answer that comes in ``pieces``, by default one that may think and call by DSML."""
    syntax = {"reasoning": THINKING, "tools": DSML, **syntax}
    parser, answer = AnswerParser(AnswerSyntax(**syntax)), Answer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.finish(is_cut=is_cut))
    assert parser.n_calls >= len(answer.calls)
    return answer
