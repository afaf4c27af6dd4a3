"""P's transfer thread: takes batches of pieces, keeps a bounded number in flight, and says how each batch ended.

There is one :class:`KVSender` for each registration of a decode process, and it alone touches its transport engine.
Everything else calls :meth:`KVSender.send` and :meth:`KVSender.cancel`, and gets exactly one :class:`SendResult` a
batch.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from server.failure import Failure
from server.threads import call_in_thread
from server.transfer.engines.base import EngineClosed, PieceStatus, SubmitFailed, Ticket, TransferEngine

log = logging.getLogger(__name__)

MAX_PIECES_IN_FLIGHT = 256
"""Mooncake's queue holds about 2,000 pieces a peer and fails what is beyond it."""
PIECES_POLLED_A_TURN = 32
SHORTEST_SLEEP_S = 30e-6
LONGEST_SLEEP_S = 1e-3
QUICK_S = 1e-3
"""For so long after a piece was submitted or has ended the pauses stay short: a small state is there by then."""
ENGINE_CLOSE_TIMEOUT_S = 2.0


class SenderClosed(EngineClosed):
    """A batch was handed to a sender that is closed."""


@dataclass(frozen=True)
class Piece:
    """``nbytes`` at address ``src`` here, for address ``dst`` in the peer, counted for ``component``."""

    component: str
    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True)
class SendJob:
    """One batch of pieces of the room ``key``. Its source memory may be read until a result says ``quiesced``."""

    key: Hashable
    batch_id: int
    pieces: tuple[Piece, ...]
    deadline_s: float
    """On the sender's clock."""


class SendOutcome(enum.StrEnum):
    APPLIED = "applied"
    """Every byte of every piece is in the peer's memory."""
    REFUSED = "refused"
    """A piece was not taken, by the peer or by the transport."""
    UNKNOWN = "unknown"
    """The fate of a piece is not known: the connection was lost, or the deadline passed with pieces in flight."""
    CANCELLED = "cancelled"
    """Given up before every piece was submitted, because of a cancel, a close, or a deadline with nothing in flight."""


@dataclass(frozen=True)
class SendResult:
    """How one batch ended."""

    key: Hashable
    batch_id: int
    outcome: SendOutcome
    reason: str
    """Empty for ``APPLIED``, else the cause in one sentence."""
    nbytes: dict[str, int]
    """Bytes known to be applied, by component."""
    pieces: int
    """Pieces known to be applied."""
    quiesced: bool
    """No piece that was ever submitted for ``key``, in this batch or another, can write any more."""

    def failure(self, components: Container[str]) -> Failure | None:
        """Why the batch was not applied, or None; names the one of ``components`` that the reason begins with."""
        if self.outcome is SendOutcome.APPLIED:
            return None
        component = self.reason.partition(":")[0]
        reason = f"the transfer ended {self.outcome}: {self.reason}"
        return Failure("transfer_failed", reason, component if component in components else "")


@dataclass
class _Room:
    """What is under way, or may still write, for one key."""

    batches: int = 0
    running: int = 0
    unknown: int = 0

    @property
    def is_quiesced(self) -> bool:
        return self.running == 0 and self.unknown == 0


@dataclass
class _Job:
    """A batch under way. Its result is sent once: when its last piece has ended, or as soon as one is ``UNKNOWN``."""

    send: SendJob
    room: _Room
    started: float
    waiting: deque[Piece]
    running: int = 0
    applied: Counter[str] = field(default_factory=Counter)
    applied_pieces: int = 0
    outcome: SendOutcome | None = None
    reason: str = ""
    is_reported: bool = False

    @property
    def has_ended(self) -> bool:
        return not self.waiting and not self.running

    def fail(self, outcome: SendOutcome, reason: str) -> None:
        """Submit nothing more. The first cause stays, but ``UNKNOWN`` replaces a cause that leaves nothing unknown."""
        self.waiting.clear()
        if self.outcome is None or (outcome is SendOutcome.UNKNOWN and self.outcome is not SendOutcome.UNKNOWN):
            self.outcome, self.reason = outcome, reason


@dataclass(frozen=True)
class _InFlight:
    engine: TransferEngine
    ticket: Ticket
    piece: Piece
    job: _Job


class Sender(Protocol):
    """The way of a room's state into one decode node: a :class:`KVSender`, or a simulated one."""

    @property
    def thread(self) -> threading.Thread | None:
        """What must live for results to come, if anything."""

    def send(self, job: SendJob) -> None: ...

    def cancel(self, key: Hashable) -> None: ...

    def forget(self, key: Hashable) -> None: ...

    async def aclose(self, timeout_s: float) -> bool: ...


class KVSender:
    """The thread. ``engine_factory`` (which also registers the source memory) and ``on_result`` run in it."""

    def __init__(
        self,
        engine_factory: Callable[[], TransferEngine],
        session: str,
        on_result: Callable[[SendResult], None],
        name: str,
        *,
        max_in_flight: int = MAX_PIECES_IN_FLIGHT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_factory = engine_factory
        self._session = session
        self._on_result = on_result
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._engine: TransferEngine | None = None
        self._jobs: list[_Job] = []
        self._in_flight: deque[_InFlight] = deque()
        self._rooms: dict[Hashable, _Room] = {}
        self._closes_at: float | None = None
        self._sleep_s = SHORTEST_SLEEP_S
        self._quick_until = 0.0

    def start(self) -> None:
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    @property
    def n_rooms(self) -> int:
        """Rooms with a batch under way or a piece of unknown fate."""
        return len(self._rooms)

    def send(self, job: SendJob) -> None:
        """Queue a batch. Batches are submitted in order and go on side by side. Raises :class:`SenderClosed`."""
        with self._gate:
            if self._is_closed:
                raise SenderClosed(f"{self._thread.name} is closed: batch {job.batch_id} of {job.key} was not taken")
            self._inbox.put(partial(self._take, job))

    def cancel(self, key: Hashable) -> None:
        """Submit no more of ``key``; its batches under way end ``CANCELLED`` when their pieces in flight have ended."""
        self._inbox.put(partial(self._cancel, key))

    def forget(self, key: Hashable) -> None:
        """Drop what is remembered of ``key``'s pieces of unknown fate: nobody will ask again whether it is quiesced."""
        self._inbox.put(partial(self._forget, key))

    def close(self, timeout_s: float) -> bool:
        """Cancel everything, wait up to ``timeout_s`` for the pieces in flight, close the engine.

        Returns whether the thread has ended. One that is stuck in its engine is left behind (it is a daemon).
        """
        with self._gate:
            self._is_closed = True
            self._inbox.put(partial(self._end, self._clock() + timeout_s))
        if self._thread.ident is not None:
            self._thread.join(timeout_s + ENGINE_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    async def aclose(self, timeout_s: float) -> bool:
        """:meth:`close`, in a thread of its own."""
        return await call_in_thread("close sender", self.close, timeout_s)

    # What follows runs in the thread.

    def _run(self) -> None:
        while self._closes_at is None or (self._in_flight and self._clock() < self._closes_at):
            try:
                self._turn()
            except Exception as error:
                log.exception("sender turn failed; its batches are given up")
                self._give_up(f"the sender failed: {error!r}")
        self._give_up("the sender was closed with pieces in flight")
        if self._engine is not None:
            self._engine.close()

    def _turn(self) -> None:
        self._receive_messages()
        submitted = self._submit_waiting()
        ended = self._poll_in_flight()
        self._expire_overdue()
        self._report_ended()
        self._pause(has_moved=submitted + ended > 0)

    def _pause(self, *, has_moved: bool) -> None:
        """How long the next look for messages may wait: shortly for :data:`QUICK_S`, then twice as long each time."""
        now = self._clock()
        if has_moved:
            self._quick_until = now + QUICK_S
        if now < self._quick_until:
            self._sleep_s = SHORTEST_SLEEP_S
        else:
            self._sleep_s = min(2 * self._sleep_s, LONGEST_SLEEP_S)

    def _receive_messages(self) -> None:
        """Sleep until a message comes, or with pieces under way until it is time to go on; then take in every message.

        A message is a call to be made in the thread.
        """
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=self._sleep_s if self._jobs or self._in_flight else None)()
        self._take_messages()

    def _take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _take(self, job: SendJob) -> None:
        room = self._rooms.setdefault(job.key, _Room())
        room.batches += 1
        self._jobs.append(_Job(job, room, self._clock(), deque(job.pieces)))

    def _cancel(self, key: Hashable) -> None:
        for job in self._jobs:
            if job.send.key == key:
                job.fail(SendOutcome.CANCELLED, "cancelled")

    def _forget(self, key: Hashable) -> None:
        self._rooms.pop(key, None)

    def _end(self, at: float) -> None:
        self._closes_at = at
        for job in self._jobs:
            job.fail(SendOutcome.CANCELLED, "the sender is closing")

    def _submit_waiting(self) -> int:
        """Submit what fits; between pieces messages are taken, so that a cancel stops the next piece."""
        submitted = 0
        for job in self._jobs:
            while job.waiting and len(self._in_flight) < self._max_in_flight:
                self._submit(job, job.waiting.popleft())
                submitted += 1
                self._take_messages()
        return submitted

    def _submit(self, job: _Job, piece: Piece) -> None:
        try:
            if self._engine is None:
                self._engine = self._engine_factory()
        except Exception as error:
            log.exception("the transfer engine could not be built")
            job.fail(SendOutcome.REFUSED, f"the transfer engine could not be built: {error}")
            return
        try:
            ticket = self._engine.submit(self._session, piece.src, piece.dst, piece.nbytes)
        except SubmitFailed as error:
            job.fail(SendOutcome.REFUSED, f"{piece.component}: {error}")
        except Exception as error:
            log.exception("submitting a piece of %s failed", piece.component)
            job.room.unknown += 1
            job.fail(SendOutcome.UNKNOWN, f"{piece.component}: submitting a piece failed: {error!r}")
        else:
            job.room.running += 1
            job.running += 1
            self._in_flight.append(_InFlight(self._engine, ticket, piece, job))

    def _poll_in_flight(self) -> int:
        """Poll some of the pieces in flight, those polled longest ago first; how many ended."""
        ended = 0
        for _ in range(min(PIECES_POLLED_A_TURN, len(self._in_flight))):
            flight = self._in_flight.popleft()
            status = self._poll(flight)
            if status is PieceStatus.RUNNING:
                self._in_flight.append(flight)
            else:
                self._settle(flight, status)
                ended += 1
        return ended

    def _poll(self, flight: _InFlight) -> PieceStatus:
        try:
            return flight.engine.poll(flight.ticket)
        except Exception:
            log.exception("polling a piece of %s failed", flight.piece.component)
            return PieceStatus.UNKNOWN

    def _settle(self, flight: _InFlight, status: PieceStatus) -> None:
        job, piece = flight.job, flight.piece
        job.room.running -= 1
        job.running -= 1
        if status is PieceStatus.APPLIED:
            job.applied[piece.component] += piece.nbytes
            job.applied_pieces += 1
        elif status is PieceStatus.REFUSED:
            job.fail(SendOutcome.REFUSED, f"{self._name(piece)} was refused: the peer has no such memory registered")
        else:
            job.room.unknown += 1
            cause = "got no answer (connection lost or timed out): it may still be written"
            job.fail(SendOutcome.UNKNOWN, f"{self._name(piece)} {cause}")
        self._drop_if_over(job)

    def _name(self, piece: Piece) -> str:
        return f"{piece.component}: a piece of {piece.nbytes} bytes for {piece.dst:#x} of {self._session}"

    def _expire_overdue(self) -> None:
        now = self._clock()
        for job in self._jobs:
            if now < job.send.deadline_s or job.has_ended:
                continue
            left = f"{job.running} pieces in flight and {len(job.waiting)} not submitted"
            outcome = SendOutcome.UNKNOWN if job.running else SendOutcome.CANCELLED
            job.fail(outcome, f"the deadline passed after {now - job.started:.3f} s with {left}")

    def _report_ended(self) -> None:
        """Report batches of which nothing better can be learned; what is left of an ``UNKNOWN`` one is polled on."""
        for job in self._jobs:
            if job.has_ended or job.outcome is SendOutcome.UNKNOWN:
                self._report(job)
        self._jobs = [job for job in self._jobs if not job.is_reported]

    def _report(self, job: _Job) -> None:
        job.is_reported = True
        job.room.batches -= 1
        self._drop_if_over(job)
        result = SendResult(
            key=job.send.key,
            batch_id=job.send.batch_id,
            outcome=job.outcome or SendOutcome.APPLIED,
            reason=job.reason,
            nbytes=dict(job.applied),
            pieces=job.applied_pieces,
            quiesced=job.room.is_quiesced,
        )
        try:
            self._on_result(result)
        except Exception:
            log.exception("the receiver of a send result failed")

    def _drop_if_over(self, job: _Job) -> None:
        if job.room.batches == 0 and job.room.is_quiesced and self._rooms.get(job.send.key) is job.room:
            del self._rooms[job.send.key]

    def _give_up(self, reason: str) -> None:
        """Report every batch that is left; the fate of the pieces in flight stays unknown."""
        for flight in self._in_flight:
            flight.job.room.unknown += 1
        for job in self._jobs:
            job.fail(SendOutcome.UNKNOWN if job.running else SendOutcome.CANCELLED, reason)
            self._report(job)
        self._jobs.clear()
        self._in_flight.clear()
