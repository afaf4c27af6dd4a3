"""How a model writes its calls of tools: what a syntax is, and what their readers share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from server.chat.events import CallArguments, CallBegin, Event

MAX_TAG_CHARS = 512
"""What is longer is no tag: nothing waits for its end."""


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text that looked like the beginning of calls and is none: it belongs to what stood before it."""

    text: str


ReaderEvent = Event | Verbatim


class CallReader(ABC):
    """Reads one block of calls, a piece at a time.

    A call is given out as soon as its name and what follows it are certain, and its arguments as they come. What breaks
    the syntax ends the block: before the first call everything from the block's beginning is :class:`Verbatim`, later
    what has not become part of a call.
    """

    def __init__(self, opening: str, first_index: int) -> None:
        """``opening`` is the text that the block begins with, up to and with its start; ``first_index`` the next
        call's.
        """
        self._unread = ""
        self._uncommitted = opening  # text that is part of no call yet
        self._next_index = first_index
        self.rest: str | None = None
        """What follows the block, once it is over."""

    @property
    def next_index(self) -> int:
        """The index of the next call, after those of this block."""
        return self._next_index

    @property
    def is_over(self) -> bool:
        return self.rest is not None

    def feed(self, text: str) -> list[ReaderEvent]:
        """Takes the next text; the block may end in the middle of it."""
        self._unread += text
        events: list[ReaderEvent] = []
        while not self.is_over and self._step(events):
            pass
        return events

    @abstractmethod
    def finish(self) -> list[ReaderEvent]:
        """No more text will come. What is only the beginning of something belongs to a call that was cut, and is no
        text for anybody.
        """

    @abstractmethod
    def _step(self, events: list[ReaderEvent]) -> bool:
        """Reads on; False if more text is needed."""

    def _take(self, n_chars: int) -> str:
        """The next ``n_chars`` of the text, which are read now, and part of no call yet."""
        taken, self._unread = self._unread[:n_chars], self._unread[n_chars:]
        self._uncommitted += taken
        return taken

    def _begin_call(self, events: list[ReaderEvent], name: str) -> None:
        events.append(CallBegin(self._next_index, name))
        self._next_index += 1
        self._uncommitted = ""

    def _arguments(self, events: list[ReaderEvent], text: str) -> None:
        """More of the arguments of the call that began last."""
        events.append(CallArguments(self._next_index - 1, text))

    def _end(self) -> bool:
        self.rest, self._unread, self._uncommitted = self._unread, "", ""
        return True

    def _give_up(self, events: list[ReaderEvent]) -> bool:
        """What is read and not part of a call was none, and what comes next does not begin another block here."""
        self._take(1)
        events.append(Verbatim(self._uncommitted))
        return self._end()


@dataclass(frozen=True)
class ToolSyntax:
    """One way to write calls. A block begins with one of ``openings``; up to two newlines before it belong to it.

    ``reader`` makes a reader of a block from its opening and the index of its first call. ``grammar`` is the Lark
    grammar of an answer that calls one of some tools, once or several times, behind reasoning or not: see
    :func:`.dsml_grammar`.
    """

    name: str
    openings: tuple[str, ...]
    reader: Callable[[str, int], CallReader]
    grammar: Callable[[Sequence[Mapping[str, Any]], bool, str | None], str]


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value, as the standard has it (no NaN)."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def n_held(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``tags``."""
    return next((n for n in range(min(len(text), max(map(len, tags)) - 1), 0, -1) if _begins(text[-n:], tags)), 0)


def _begins(text: str, tags: Sequence[str]) -> bool:
    return any(tag.startswith(text) and tag != text for tag in tags)
