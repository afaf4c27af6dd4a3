"""The calls of Hermes, Qwen and many others: JSON between two tags.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from __future__ import annotations

import enum
import json
import re
from typing import Any

from server.chat.calls import MAX_TAG_CHARS, CallReader, ReaderEvent, is_json, n_held

BEGIN = "<tool_call>"
END = "</tool_call>"

_MAX_HEAD_CHARS = 1 << 14
"""A call that does not begin with its name is read as a whole, up to this length."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_STRUCTURE = re.compile(r'[{}\[\]"]|</tool_call>')
_IN_STRING = re.compile(r'["\\]')


class _Place(enum.Enum):
    HEAD = enum.auto()
    """Before the arguments, which are given out as they come if the name stands before them."""
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()


class HermesReader(CallReader):
    """Reads one call. Its JSON may have its keys in any order, and the last tag may be missing."""

    def __init__(self, opening: str, first_index: int) -> None:
        super().__init__(opening, first_index)
        self._place = _Place.HEAD
        self._n_searched = 0
        self._depth = 0
        self._is_in_string = False

    def finish(self) -> list[ReaderEvent]:
        events: list[ReaderEvent] = []
        if self._place is _Place.HEAD:
            self._read_whole(events, self._unread)
        elif self._place is _Place.ARGUMENTS:
            n_value = len(self._unread) - n_held(self._unread, (END,))
            self._arguments(events, self._unread[:n_value])
        self._end()
        return events

    def _step(self, events: list[ReaderEvent]) -> bool:
        if self._place is _Place.HEAD:
            return self._read_head(events)
        if self._place is _Place.ARGUMENTS:
            return self._read_arguments(events)
        end = self._unread.find(END)
        if end < 0:
            self._unread = self._unread[len(self._unread) - n_held(self._unread, (END,)) :]
            return False
        self._unread = self._unread[end + len(END) :]
        return self._end()

    def _read_head(self, events: list[ReaderEvent]) -> bool:
        unread = self._unread
        if self._n_searched < MAX_TAG_CHARS:
            match = _HEAD.match(unread, 0, MAX_TAG_CHARS)
            name = _loads(match[1]) if match is not None else None
            if match is not None and isinstance(name, str) and name:
                self._begin_call(events, name)
                self._unread, self._place = unread[match.end() :], _Place.ARGUMENTS
                return True
        end = unread.find(END, max(0, self._n_searched - len(END)), _MAX_HEAD_CHARS)
        self._n_searched = len(unread)
        bare = unread.lstrip()
        if end < 0 and (not bare or bare.startswith("{")) and len(unread) < _MAX_HEAD_CHARS:
            return False
        if end >= 0 and self._read_whole(events, unread[:end]):
            self._unread = unread[end + len(END) :]
            return self._end()
        return self._give_up(events)

    def _read_whole(self, events: list[ReaderEvent], text: str) -> bool:
        """A call whose JSON is complete; False if it is none."""
        call = _loads(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return False
        arguments = call.get("arguments", call.get("parameters"))
        self._begin_call(events, name)
        self._arguments(events, _as_arguments(arguments))
        return True

    def _read_arguments(self, events: list[ReaderEvent]) -> bool:
        """Up to the brace that ends them; brackets count outside of strings only."""
        unread, at = self._unread, 0
        while True:
            found = (_IN_STRING if self._is_in_string else _STRUCTURE).search(unread, at)
            if found is None:
                n_value = len(unread) - (0 if self._is_in_string else n_held(unread[at:], (END,)))
                break
            mark = found[0]
            if mark == "\\" and found.end() == len(unread):
                n_value = found.start()
                break
            if mark == END:
                return self._end_arguments(events, found.start())
            at = found.end() + (mark == "\\")
            if mark == '"':
                self._is_in_string = not self._is_in_string
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._end_arguments(events, at)
        self._arguments(events, unread[:n_value])
        self._unread = unread[n_value:]
        return False

    def _end_arguments(self, events: list[ReaderEvent], n_value: int) -> bool:
        self._arguments(events, self._unread[:n_value])
        self._unread, self._place = self._unread[n_value:], _Place.TAIL
        return True


def _as_arguments(value: Any) -> str:
    if isinstance(value, str):
        return value if is_json(value) else json.dumps(value, ensure_ascii=False)
    return "{}" if value is None else json.dumps(value, ensure_ascii=False)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
