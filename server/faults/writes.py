"""Faults in the data plane: any transport engine, with rules for the writes that go wrong.

The rules speak of source memory, so a fault needs to know nothing of pieces: a piece that reads one byte under a rule
obeys it.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from server.faults.spec import STATE, FaultKind
from server.transfer.engines.base import PieceStatus, SubmitFailed, Ticket, TransferEngine, TransferError

log = logging.getLogger(__name__)

_LATE_POLL_S = 1e-3
_LATE_TIMEOUT_S = 10.0
_REPLACED = STATE - {FaultKind.DROP}


@dataclass(frozen=True)
class Rule:
    """What happens to the source bytes ``address .. address + nbytes - 1``, or to the whole piece that has one of them.

    ``DROP``: they are not written, and reported applied. ``FAIL_WRITES``, ``DELAY_WRITES``, ``LATE_WRITES``: the piece
    is refused, ``seconds`` late, or reported of unknown fate and ``seconds`` late. The others of ``STATE``: ``data`` is
    written in their place, out of a registered scratch buffer.
    """

    kind: FaultKind
    address: int
    nbytes: int
    data: bytes = b""
    seconds: float = 0.0

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class WriteFaults:
    """The rules in force, by who armed them. Shared by a node and its engines, also across threads."""

    def __init__(self) -> None:
        self._rules: dict[Hashable, tuple[Rule, ...]] = {}

    def arm(self, key: Hashable, rules: tuple[Rule, ...]) -> None:
        self._rules[key] = (*self._rules.get(key, ()), *rules)

    def disarm(self, key: Hashable) -> None:
        self._rules.pop(key, None)

    def of(self, address: int, nbytes: int) -> list[Rule]:
        """The rules for a piece that reads these bytes."""
        armed = list(self._rules.values())
        return [rule for rules in armed for rule in rules if rule.address < address + nbytes and address < rule.end]


@dataclass(frozen=True)
class _Piece:
    session: str
    src: int
    dst: int
    nbytes: int


@dataclass
class _Write:
    """One ticket given out: pieces that are still to be submitted, at ``start``, and those under way."""

    waiting: list[_Piece]
    start: float = 0.0
    running: list[Ticket] = field(default_factory=list)
    verdict: PieceStatus = PieceStatus.APPLIED
    """The worst of what has ended."""


class FaultyEngine:
    """``inner``, but for the writes that ``faults`` has rules for. CPU memory only.

    The first region that is registered is the one that rules are about; a scratch buffer of its size is registered
    beside it.
    """

    def __init__(self, inner: TransferEngine, faults: WriteFaults) -> None:
        self.kind, self.version = inner.kind, inner.version
        self.session, self.transport = inner.session, inner.transport
        self._inner, self._faults = inner, faults
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._writes: dict[Ticket, _Write] = {}
        self._timers: set[threading.Timer] = set()
        self._base = 0
        self._scratch: ctypes.Array[ctypes.c_char] | None = None
        self._closed = False

    def register(self, ptr: int, nbytes: int) -> None:
        self._inner.register(ptr, nbytes)
        if self._scratch is None:
            self._base, self._scratch = ptr, ctypes.create_string_buffer(nbytes)
            self._inner.register(ctypes.addressof(self._scratch), nbytes)

    def unregister(self, ptr: int) -> None:
        self._inner.unregister(ptr)

    def submit(self, session: str, src: int, dst: int, nbytes: int) -> Ticket:
        piece = _Piece(session, src, dst, nbytes)
        rules = self._faults.of(src, nbytes)
        kinds = {rule.kind for rule in rules}
        ticket = Ticket(next(self._tickets))
        with self._lock:
            if FaultKind.FAIL_WRITES in kinds:
                self._writes[ticket] = _Write([], verdict=PieceStatus.REFUSED)
            elif FaultKind.LATE_WRITES in kinds:
                self._write_later(piece, max(rule.seconds for rule in rules))
                self._writes[ticket] = _Write([], verdict=PieceStatus.UNKNOWN)
            else:
                write = _Write(list(self._changed(piece, rules)))
                write.start = time.monotonic() + max((rule.seconds for rule in rules), default=0.0)
                self._start(write)
                self._writes[ticket] = write
        return ticket

    def poll(self, ticket: Ticket) -> PieceStatus:
        with self._lock:
            write = self._writes[ticket]
            try:
                self._start(write)
            except SubmitFailed:
                write.verdict = PieceStatus.REFUSED
                write.waiting.clear()
            still_running = []
            for part in write.running:
                status = self._inner.poll(part)
                if status is PieceStatus.RUNNING:
                    still_running.append(part)
                elif status is not PieceStatus.APPLIED and write.verdict is not PieceStatus.UNKNOWN:
                    write.verdict = status
            write.running = still_running
            if write.waiting or still_running:
                return PieceStatus.RUNNING
            del self._writes[ticket]
            return write.verdict

    def close(self) -> None:
        """Ends the endpoint. What was to be written later never is."""
        with self._lock:
            self._closed = True
            timers = list(self._timers)
            self._inner.close()
        for timer in timers:
            timer.cancel()

    def _is_closed(self) -> bool:
        return self._closed

    def _start(self, write: _Write) -> None:
        """Submits what is due. Raises what the inner engine raises, with what it did not take still waiting."""
        while write.waiting and time.monotonic() >= write.start:
            piece = write.waiting[0]
            write.running.append(self._inner.submit(piece.session, piece.src, piece.dst, piece.nbytes))
            write.waiting.pop(0)

    def _changed(self, piece: _Piece, rules: list[Rule]) -> Iterator[_Piece]:
        """The pieces to write instead of ``piece``."""
        source = piece.src
        replaced = [rule for rule in rules if rule.kind in _REPLACED]
        if replaced and self._scratch is not None:
            source = ctypes.addressof(self._scratch) + piece.src - self._base
            ctypes.memmove(source, piece.src, piece.nbytes)
            for rule in replaced:
                start, end = max(rule.address, piece.src), min(rule.end, piece.src + piece.nbytes)
                part = rule.data[start - rule.address : end - rule.address]
                ctypes.memmove(source + start - piece.src, part, len(part))
        done = 0
        skipped = sorted((r.address - piece.src, r.end - piece.src) for r in rules if r.kind is FaultKind.DROP)
        for start, end in [*skipped, (piece.nbytes, piece.nbytes)]:
            if start > done:
                yield _Piece(piece.session, source + done, piece.dst + done, start - done)
            done = max(done, end)

    def _write_later(self, piece: _Piece, seconds: float) -> None:
        data = ctypes.create_string_buffer(ctypes.string_at(piece.src, piece.nbytes), piece.nbytes)
        timer = threading.Timer(seconds, lambda: self._land(timer, piece, data))
        timer.daemon = True
        self._timers.add(timer)
        timer.start()

    def _land(self, timer: threading.Timer, piece: _Piece, data: ctypes.Array[ctypes.c_char]) -> None:
        """Writes a late piece, in its timer's thread."""
        address, deadline = ctypes.addressof(data), time.monotonic() + _LATE_TIMEOUT_S
        try:
            with self._lock:
                self._timers.discard(timer)
                if self._is_closed():
                    return
                self._inner.register(address, piece.nbytes)
                ticket = self._inner.submit(piece.session, address, piece.dst, piece.nbytes)
            status = PieceStatus.RUNNING
            while status is PieceStatus.RUNNING and time.monotonic() < deadline:
                time.sleep(_LATE_POLL_S)
                with self._lock:
                    if self._is_closed():
                        return
                    status = self._inner.poll(ticket)
            log.warning("FAULT INJECTION: a late write of %d bytes to %#x ended %s", piece.nbytes, piece.dst, status)
            with self._lock:
                if not self._is_closed() and status is not PieceStatus.RUNNING:
                    self._inner.unregister(address)
        except TransferError as error:
            log.warning("FAULT INJECTION: a late write of %d bytes to %#x failed: %s", piece.nbytes, piece.dst, error)
