"""From an answer's text, as it comes, to reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.chat.calls import CallReader, ReaderEvent, ToolSyntax, Verbatim, n_held
from server.chat.events import CallArguments, CallBegin, Content, Event, Reasoning, joined

_PIECE_CHARS = 4096
"""A longer text is read in pieces, so that what is read costs nothing again."""
_MAX_NEWLINES = 2
"""Newlines before a block of calls that are the block's."""


@dataclass(frozen=True)
class ReasoningTags:
    """Between which tags a model writes its reasoning, at the beginning of an answer."""

    begin: str
    end: str


@dataclass(frozen=True)
class AnswerSyntax:
    """What is looked for in an answer, and what is told of it.

    ``reasoning`` None: reasoning is not told from content. ``starts_in_reasoning``: the prompt has begun it;
    ``has_ended_reasoning``: the prompt has ended it, and the answer has none. ``tools`` None: calls are not looked for.
    With ``whole_reasoning`` it is given out in one piece, with ``hides_reasoning`` not at all. ``max_calls``: those
    after it are left out.
    """

    reasoning: ReasoningTags | None = None
    tools: ToolSyntax | None = None
    starts_in_reasoning: bool = False
    has_ended_reasoning: bool = False
    hides_reasoning: bool = False
    whole_reasoning: bool = False
    max_calls: int | None = None


class AnswerParser:
    """Reads one answer. All events put together do not depend on how the text was cut into pieces, and what it costs
    follows the text's length. It never fails: what is no call is content, as it was written.

    What may be the beginning of a tag is held back until it is certain. At the end, the beginning of a tag is left out.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax = syntax
        self._held = ""
        self._reader: CallReader | None = None
        self._n_calls = 0
        self._is_reasoning = syntax.starts_in_reasoning and syntax.reasoning is not None
        self._is_at_start = syntax.reasoning is not None and not syntax.has_ended_reasoning
        self._skips_space = False
        self._reasoning: list[str] = []

    @property
    def n_calls(self) -> int:
        """How many calls the answer has so far."""
        return self._n_calls if self._reader is None else self._reader.next_index

    def feed(self, text: str) -> list[Event]:
        """What the next text adds and is certain now."""
        events: list[Event] = []
        for i in range(0, len(text), _PIECE_CHARS):
            self._read(text[i : i + _PIECE_CHARS], events)
        return self._shown(events)

    def finish(self, *, is_cut: bool) -> list[Event]:
        """No more text comes. ``is_cut``: the model would have written more."""
        events: list[Event] = []
        if self._reader is not None:
            self._add(self._reader.finish(), events)
            self._n_calls, self._reader = self._reader.next_index, None
        elif not is_cut and len(self._held.strip()) <= 1:  # the first character of a tag is in many a text
            self._plain(self._held, events)
        self._held = ""
        shown = self._shown(events)  # before what it leaves over
        return joined([*self._whole_reasoning(), *shown])

    def _read(self, text: str, events: list[Event]) -> None:
        unread: str | None = text
        while unread is not None:
            if self._reader is not None:
                self._add(self._reader.feed(unread), events)
                unread = self._end_block()
            else:
                unread = self._read_plain(self._held + unread, events)

    def _end_block(self) -> str | None:
        """What follows the block that is being read; None while it goes on."""
        assert self._reader is not None
        rest, n_calls = self._reader.rest, self._reader.next_index
        if rest is None:
            return None
        if n_calls > self._n_calls:
            self._n_calls, self._is_reasoning, self._skips_space = n_calls, False, True
        self._reader = None
        return rest

    def _read_plain(self, text: str, events: list[Event]) -> str | None:
        """Reads up to the next tag, and gives back what follows it; None if there is none yet."""
        self._held = ""
        if self._is_at_start:
            return self._read_start(text)
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        reasoning = self._syntax.reasoning
        ends = (reasoning.end,) if self._is_reasoning and reasoning is not None else ()
        openings = self._syntax.tools.openings if self._syntax.tools is not None else ()
        at, tag = _first(text, (*ends, *openings))
        if tag is None:
            n_open = _n_open(text, ends, openings)
            self._held = text[len(text) - n_open :]
            self._plain(text[: len(text) - n_open], events)
            return None
        rest = text[at + len(tag) :]
        if tag in ends:
            self._plain(text[:at], events)
            self._is_reasoning = False
            return rest
        n_newlines = _n_newlines(text[:at])
        self._plain(text[: at - n_newlines], events)
        assert self._syntax.tools is not None
        self._reader = self._syntax.tools.reader(text[at - n_newlines : at + len(tag)], self._n_calls)
        return rest

    def _read_start(self, text: str) -> str | None:
        """An answer may begin its reasoning itself, also where the prompt has done so."""
        assert self._syntax.reasoning is not None
        begin = self._syntax.reasoning.begin
        bare = text.lstrip()
        if bare.startswith(begin):
            self._is_at_start, self._is_reasoning = False, True
            return bare[len(begin) :]
        if begin.startswith(bare) and len(text) < _PIECE_CHARS:
            self._held = text
            return None
        self._is_at_start = False
        return text

    def _add(self, new: Sequence[ReaderEvent], events: list[Event]) -> None:
        assert self._reader is not None
        for event in new:
            if isinstance(event, Verbatim):
                self._is_reasoning &= self._reader.next_index == self._n_calls  # behind a call it is content
                self._plain(event.text, events)
            else:
                events.append(event)

    def _plain(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Reasoning(text) if self._is_reasoning else Content(text))

    def _shown(self, events: list[Event]) -> list[Event]:
        """``events`` as far as the request wants them, and when."""
        syntax = self._syntax
        shown: list[Event] = []
        for event in joined(events):
            if isinstance(event, Reasoning):
                if syntax.whole_reasoning and not syntax.hides_reasoning:
                    self._reasoning.append(event.text)
                elif not syntax.hides_reasoning:
                    shown.append(event)
                continue
            if isinstance(event, CallBegin | CallArguments) and (
                syntax.max_calls is not None and event.index >= syntax.max_calls
            ):
                continue
            shown += [*self._whole_reasoning(), event]
        return shown

    def _whole_reasoning(self) -> list[Event]:
        text = "".join(self._reasoning)
        self._reasoning.clear()
        return [Reasoning(text)] if text else []


def _first(text: str, tags: Sequence[str]) -> tuple[int, str | None]:
    """Where the first of ``tags`` stands in ``text``."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found, default=(len(text), None), key=lambda each: each[0])


def _n_open(text: str, ends: Sequence[str], openings: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may belong to a tag, with the newlines before it."""
    if not text or not (ends or openings):
        return 0
    n_end = n_held(text, ends) if ends else 0
    if not openings:
        return n_end
    n_opening = n_held(text, openings)
    return max(n_end, n_opening + _n_newlines(text[: len(text) - n_opening]))


def _n_newlines(text: str) -> int:
    """How many newlines at the end of ``text`` are those of a block of calls."""
    tail = text[-_MAX_NEWLINES:]
    return len(tail) - len(tail.rstrip("\n"))
