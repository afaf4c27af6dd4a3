"""An in-process transport for tests: pieces are copied inside this process, and a hook makes one go wrong.

Sessions live in a process-wide table, so that two nodes in one test process find each other.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.transfer.engines.base import EngineClosed, PieceStatus, RegistrationFailed, SubmitFailed, Ticket


class PieceFate(enum.StrEnum):
    """What happens to one piece instead of being applied."""

    REFUSE = "refuse"
    """Answered ``REFUSED``; nothing is written."""
    LOSE = "lose"
    """Answered ``UNKNOWN``; nothing is written."""
    LAND_LATE = "land_late"
    """Answered ``UNKNOWN``; its bytes are written by :meth:`LoopbackEngine.land_late`."""
    HANG = "hang"
    """Stays ``RUNNING`` until :meth:`LoopbackEngine.release`, which applies it."""
    CORRUPT = "corrupt"
    """Answered ``APPLIED`` with the first byte inverted."""
    RAISE = "raise"
    """``submit`` raises an error that is no :class:`~server.transfer.engines.base.TransferError`."""


@dataclass(frozen=True)
class Submission:
    """One piece as ``fate_of`` sees it; ``ordinal`` counts this engine's submissions from 0."""

    ordinal: int
    session: str
    src: int
    dst: int
    nbytes: int


FateOf = Callable[[Submission], PieceFate | None]


@dataclass
class _Write:
    submission: Submission
    peer: LoopbackEngine
    fate: PieceFate | None
    due: float


_engines: dict[str, LoopbackEngine] = {}
_lock = threading.Lock()
_numbers = itertools.count(1)


class LoopbackEngine:
    """``fate_of`` is asked once a piece; ``delay_s`` is the time from ``submit`` to a terminal status."""

    kind = "loopback"
    version = "1"
    transport = "memory"

    def __init__(self, *, fate_of: FateOf | None = None, delay_s: float = 0.0) -> None:
        self.fate_of = fate_of
        self.delay_s = delay_s
        self.submitted = 0
        self._regions: dict[int, int] = {}
        self._writes: dict[Ticket, _Write] = {}
        self._late: list[_Write] = []
        self._tickets = itertools.count(1)
        self.closed = False
        with _lock:
            self.session = f"loopback:{next(_numbers)}"
            _engines[self.session] = self

    def register(self, ptr: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise RegistrationFailed(f"a region has at least one byte, not {nbytes}")
        with _lock:
            for start, length in self._regions.items():
                if ptr < start + length and start < ptr + nbytes:
                    raise RegistrationFailed(
                        f"[{ptr:#x}, +{nbytes}) overlaps the registered region [{start:#x}, +{length})"
                    )
            self._regions[ptr] = nbytes

    def unregister(self, ptr: int) -> None:
        with _lock:
            if self._regions.pop(ptr, None) is None:
                raise RegistrationFailed(f"no region is registered at {ptr:#x}")

    def submit(self, session: str, src: int, dst: int, nbytes: int) -> Ticket:
        if self.closed:
            raise EngineClosed("the loopback engine is closed")
        if nbytes <= 0:
            raise SubmitFailed(f"a piece has at least one byte, not {nbytes}")
        with _lock:
            peer = _engines.get(session)
        if peer is None:
            raise SubmitFailed(f"no loopback engine has the session {session!r}")
        submission = Submission(self.submitted, session, src, dst, nbytes)
        self.submitted += 1
        fate = self.fate_of(submission) if self.fate_of else None
        if fate is PieceFate.RAISE:
            raise RuntimeError(f"injected: submission {submission.ordinal} raises")
        if fate is None and not peer.is_registered(dst, nbytes):
            fate = PieceFate.REFUSE
        ticket = Ticket(next(self._tickets))
        with _lock:
            self._writes[ticket] = _Write(submission, peer, fate, time.monotonic() + self.delay_s)
        return ticket

    def poll(self, ticket: Ticket) -> PieceStatus:
        with _lock:
            write = self._writes[ticket]
            if time.monotonic() < write.due or (write.fate is PieceFate.HANG and not write.peer.closed):
                return PieceStatus.RUNNING
            del self._writes[ticket]
            return self._finish(write)

    def release(self) -> None:
        """Let every hanging piece be applied at its next poll, and hang none that is submitted from now on."""
        with _lock:
            self.fate_of = None
            for write in self._writes.values():
                if write.fate is PieceFate.HANG:
                    write.fate = None

    def land_late(self) -> int:
        """Write what ``LAND_LATE`` pieces left behind, where the peer still exists; the number of bytes."""
        with _lock:
            landing = [write for write in self._late if not write.peer.closed]
            self._late.clear()
            for write in landing:
                _copy(write.submission)
        return sum(write.submission.nbytes for write in landing)

    def close(self) -> None:
        with _lock:
            self.closed = True
            _engines.pop(self.session, None)
            self._writes.clear()

    def is_registered(self, address: int, nbytes: int) -> bool:
        with _lock:
            return any(
                start <= address and address + nbytes <= start + length for start, length in self._regions.items()
            )

    def _finish(self, write: _Write) -> PieceStatus:
        if write.fate is PieceFate.REFUSE:
            return PieceStatus.REFUSED
        if write.fate is PieceFate.LOSE or write.peer.closed:
            return PieceStatus.UNKNOWN
        if write.fate is PieceFate.LAND_LATE:
            self._late.append(write)
            return PieceStatus.UNKNOWN
        _copy(write.submission)
        if write.fate is PieceFate.CORRUPT:
            first = ctypes.c_ubyte.from_address(write.submission.dst)
            first.value ^= 0xFF
        return PieceStatus.APPLIED


def _copy(submission: Submission) -> None:
    ctypes.memmove(submission.dst, submission.src, submission.nbytes)
