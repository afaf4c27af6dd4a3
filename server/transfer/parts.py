"""Rows of bytes that go over the control connection in parts: in order, sent again until they are known to be there.

Small frames have a cap, and a connection that breaks loses messages. So rows are cut into parts, a few of which are
under way at a time; the other side says how far it has come, and at the end the number of rows and the digest over all
of them must be equal. Rows are counted from ``first``, the position in the prompt that the first of them is about.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import xxhash

PROMPT_LOGPROBS = "prompt_logprobs"
"""What goes in parts, by the name that failures have for it."""
PART_NBYTES = 64 << 10
"""The most bytes of rows in one part."""
MAX_UNDER_WAY = 4
"""Parts of one room that are sent before the other side has said that it has them."""


class BadPart(Exception):
    """A part that no correct peer sends."""


class Part(NamedTuple):
    """Rows of the positions from ``start`` on, one behind the other."""

    start: int
    rows: bytes


class PartsToSend:
    """Rows that are still being made, on their way. What the other side has is kept no longer."""

    def __init__(self, row_nbytes: int, first: int) -> None:
        self._row_nbytes, self._stop = row_nbytes, first
        self._digest = xxhash.xxh3_64()
        self._unsent: deque[Part] = deque()
        self._under_way: deque[Part] = deque()

    @property
    def stop(self) -> int:
        """The position behind the last row that was added."""
        return self._stop

    @property
    def digest(self) -> int:
        """xxh3_64 over all rows so far."""
        return self._digest.intdigest()

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def have_all_arrived(self) -> bool:
        """Whether the other side has everything that was added."""
        return not self._unsent and not self._under_way

    def add(self, rows: bytes) -> None:
        """The next rows are there."""
        self._digest.update(rows)
        most = PART_NBYTES // self._row_nbytes * self._row_nbytes
        for i in range(0, len(rows), most):
            part = Part(self._stop, rows[i : i + most])
            self._stop += len(part.rows) // self._row_nbytes
            self._unsent.append(part)

    def next(self) -> list[Part]:
        """Those that are to be sent now for the first time."""
        parts = []
        while self._unsent and len(self._under_way) < MAX_UNDER_WAY:
            parts.append(self._unsent.popleft())
            self._under_way.append(parts[-1])
        return parts

    def again(self) -> list[Part]:
        """Those that were sent, and may be lost."""
        return list(self._under_way)

    def arrived(self, stop: int) -> bool:
        """The other side has all rows before position ``stop``. Whether that is news."""
        is_news = False
        while self._under_way and self._end_of(self._under_way[0]) <= stop:
            self._under_way.popleft()
            is_news = True
        return is_news

    def _end_of(self, part: Part) -> int:
        return part.start + len(part.rows) // self._row_nbytes


class PartsReceived:
    """Rows for the positions ``first .. stop - 1``, as far as they have come without a gap."""

    def __init__(self, row_nbytes: int, first: int, stop: int) -> None:
        self._row_nbytes, self.first, self.stop = row_nbytes, first, stop
        self._digest = xxhash.xxh3_64()
        self.rows = bytearray()

    @property
    def next(self) -> int:
        """The first position that is missing."""
        return self.first + len(self.rows) // self._row_nbytes

    @property
    def is_complete(self) -> bool:
        return self.next == self.stop

    @property
    def digest(self) -> int:
        """xxh3_64 over all rows so far."""
        return self._digest.intdigest()

    def take(self, start: int, rows: bytes) -> bool:
        """Whether it is the next part. One that has come before, and one behind a gap, are left out: the other side
        hears of :attr:`next`, and sends again what is missing.

        :raises BadPart: it is no whole number of rows, is outside of what is expected, or is not what came before.
        """
        n_rows, rest = divmod(len(rows), self._row_nbytes)
        if rest or not n_rows:
            raise BadPart(f"{len(rows)} bytes for position {start} are no whole number of rows of {self._row_nbytes}")
        if start < self.first or start + n_rows > self.stop:
            wanted = f"{self.first} .. {self.stop - 1}"
            raise BadPart(f"rows for positions {start} .. {start + n_rows - 1} are outside of {wanted}")
        if start > self.next:
            return False
        if start < self.next:
            offset = (start - self.first) * self._row_nbytes
            if self.rows[offset : offset + len(rows)] != rows:
                raise BadPart(f"rows for positions {start} .. {start + n_rows - 1} came again, and are others")
            return False
        self.rows += rows
        self._digest.update(rows)
        return True
