"""DSML, in which DeepSeek-V4 writes calls: tags that begin with the token ``｜DSML｜``.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="x" string="true">any text</｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">{"any": "JSON"}</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>
"""

from __future__ import annotations

import enum
import re

from server.chat.calls import MAX_TAG_CHARS, CallReader, ReaderEvent, is_json, json_string, n_held

CALLS = "<｜DSML｜tool_calls>"
END_CALLS = "</｜DSML｜tool_calls>"
INVOKE = "<｜DSML｜invoke"
END_INVOKE = "</｜DSML｜invoke>"
PARAMETER = "<｜DSML｜parameter"
END_PARAMETER = "</｜DSML｜parameter>"
OPENINGS = (CALLS, INVOKE + " ")
"""Some answers leave out the first line."""

_INVOKE = re.compile(INVOKE + r'\s+name="([^"]+)"\s*>')
_CLOSED = re.compile(r'(?:[^">]|"[^"]*")*+>')
"""A tag that has its end."""
_PARAMETER = re.compile(PARAMETER + r'\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>')


class _Place(enum.Enum):
    BETWEEN_CALLS = enum.auto()
    NAMED = enum.auto()
    """Behind a call's first tag: it is no call before something of it follows."""
    IN_CALL = enum.auto()
    IN_TEXT = enum.auto()
    """In a parameter's value that is a text."""
    IN_JSON = enum.auto()
    """In one that is JSON, or has to be looked at as a whole to know what it is."""


class DsmlReader(CallReader):
    """Reads one block. The first line, the last one, and the end of a call may be missing."""

    def __init__(self, opening: str, first_index: int) -> None:
        super().__init__(opening, first_index)
        self._place = _Place.BETWEEN_CALLS
        self._name = ""
        self._n_parameters = 0
        self._value: list[str] = []
        if opening.endswith(OPENINGS[1]):
            n_tag = len(OPENINGS[1])
            self._uncommitted, self._unread = opening[:-n_tag], opening[-n_tag:]

    def finish(self) -> list[ReaderEvent]:
        events: list[ReaderEvent] = []
        n_tag = n_held(self._unread, (END_PARAMETER,))
        value = self._unread[: len(self._unread) - n_tag]
        if self._place is _Place.IN_TEXT:
            self._arguments(events, json_string(value)[1:-1])
        elif self._place is _Place.IN_JSON:
            self._arguments(events, "".join([*self._value, value]).strip())
        self._end()
        return events

    def _step(self, events: list[ReaderEvent]) -> bool:
        if self._place in (_Place.IN_TEXT, _Place.IN_JSON):
            return self._read_value(events)
        n_space = len(self._unread) - len(self._unread.lstrip())
        self._take(n_space)
        if not self._unread:
            return False
        if self._place is _Place.BETWEEN_CALLS:
            return self._read_between_calls(events)
        return self._read_in_call(events)

    def _read_between_calls(self, events: list[ReaderEvent]) -> bool:
        if self._unread.startswith(END_CALLS):
            if self._uncommitted.strip():
                return self._give_up(events)  # there was no call that it could end
            self._unread = self._unread[len(END_CALLS) :]
            return self._end()
        if (match := _match(_INVOKE, self._unread)) is not None:
            self._take(match.end())
            self._name, self._n_parameters, self._place = match[1], 0, _Place.NAMED
            return True
        return self._wait_or_give_up(events, (INVOKE,), (END_CALLS,))

    def _read_in_call(self, events: list[ReaderEvent]) -> bool:
        unread = self._unread
        if (match := _match(_PARAMETER, unread)) is not None:
            self._commit(events)
            self._unread = unread[match.end() :]
            begin = ("{" if not self._n_parameters else ", ") + json_string(match[1]) + ": "
            self._n_parameters += 1
            self._place = _Place.IN_TEXT if match[2] == "true" else _Place.IN_JSON
            self._arguments(events, begin + ('"' if self._place is _Place.IN_TEXT else ""))
            return True
        is_end = unread.startswith(END_INVOKE)
        if is_end or unread.startswith(END_CALLS) or _match(_INVOKE, unread) is not None:
            self._commit(events)
            self._arguments(events, "}" if self._n_parameters else "{}")
            self._unread = unread[len(END_INVOKE) :] if is_end else unread
            self._place = _Place.BETWEEN_CALLS
            return True
        return self._wait_or_give_up(events, (PARAMETER, INVOKE), (END_INVOKE, END_CALLS))

    def _commit(self, events: list[ReaderEvent]) -> None:
        if self._place is _Place.NAMED:
            self._begin_call(events, self._name)
            self._place = _Place.IN_CALL
        self._uncommitted = ""

    def _read_value(self, events: list[ReaderEvent]) -> bool:
        end = self._unread.find(END_PARAMETER)
        n_value = end if end >= 0 else len(self._unread) - n_held(self._unread, (END_PARAMETER,))
        value = self._unread[:n_value]
        self._unread = self._unread[n_value:]
        if self._place is _Place.IN_TEXT:
            self._arguments(events, json_string(value)[1:-1])
        elif value:
            self._value.append(value)
        if end < 0:
            return False
        self._unread = self._unread[len(END_PARAMETER) :]
        if self._place is _Place.IN_TEXT:
            self._arguments(events, '"')
        else:
            value = "".join(self._value)
            self._value.clear()
            self._arguments(events, value.strip() if is_json(value) else json_string(value))
        self._place = _Place.IN_CALL
        return True

    def _wait_or_give_up(self, events: list[ReaderEvent], begins: tuple[str, ...], tags: tuple[str, ...]) -> bool:
        """False while the unread text may become one of ``tags``, or a tag that begins with one of ``begins``."""
        unread = self._unread
        may_become = any(tag.startswith(unread) for tag in (*begins, *tags)) or (
            unread.startswith(begins) and len(unread) <= MAX_TAG_CHARS and _CLOSED.match(unread) is None
        )
        if may_become:
            return False
        if self._place is _Place.IN_CALL:
            self._arguments(events, "}")
        return self._give_up(events)


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Where the text's first tag matches, and is a tag by its length."""
    return pattern.match(text, 0, MAX_TAG_CHARS)
