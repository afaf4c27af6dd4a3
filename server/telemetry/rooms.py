"""Keeps the records of a node's rooms: of those that run, and of the last ones that ended. Lives in the event loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

from server.failure import Failure
from server.telemetry.record import (
    Attempt,
    Clocks,
    FailureRecord,
    Phase,
    PhaseName,
    Refusal,
    RoomList,
    RoomRecord,
    Tokens,
    Transfer,
)
from server.telemetry.trace_context import TraceSpan, parse_traceparent, span_below
from server.transfer.protocol import Done, Timings

KEPT_REFUSALS = 64
DECODE, PREFILL = "decode", "prefill"


class RoomRecorder:
    """Writes the record of one room. ``began`` and every ``now`` are readings of one clock, in seconds.

    The counters are written for every output of the engine: they are plain numbers, and so is ``token_at``, when the
    last one came.
    """

    __slots__ = (
        "_attempts",
        "_began",
        "_began_unix_us",
        "_clocks",
        "_ended_at",
        "_read",
        "_starts",
        "_transfer",
        "failure",
        "first_token_at",
        "max_new",
        "n_accepted",
        "n_attempts",
        "n_generated",
        "n_prompt",
        "n_proposed",
        "n_reused",
        "n_steps",
        "node",
        "outcome",
        "request_id",
        "room",
        "span",
        "token_at",
    )

    def __init__(
        self,
        node: str,
        room: int,
        request_id: str,
        *,
        n_prompt: int,
        max_new: int,
        began: float,
        began_unix_us: int,
        first: PhaseName,
        span: TraceSpan | None = None,
    ) -> None:
        self.node, self.room, self.request_id = node, room, request_id
        self.n_prompt, self.max_new, self.span = n_prompt, max_new, span
        self.n_generated = self.n_steps = self.n_proposed = self.n_accepted = self.n_reused = 0
        self.first_token_at: float | None = None
        self.token_at = began
        self.failure: Failure | None = None
        self.outcome: str | None = None
        self.n_attempts = 1
        self._began, self._began_unix_us = began, began_unix_us
        self._ended_at: float | None = None
        self._read: RoomRecord | None = None
        self._starts: list[tuple[PhaseName, str, int, float]] = [(first, node, 1, began)]
        self._attempts: list[Attempt] = []
        self._transfer: Transfer | None = None
        self._clocks: Clocks | None = None

    @property
    def is_over(self) -> bool:
        return self._ended_at is not None

    @property
    def phase(self) -> PhaseName:
        """The one that it is in, or ended in."""
        return self._starts[-1][0]

    @property
    def peer(self) -> str | None:
        """The other node of the latest attempt, if there was one."""
        return self._attempts[-1].peer if self._attempts else None

    @property
    def traceparent(self) -> str | None:
        """For whoever works for this room."""
        return None if self.span is None else self.span.traceparent

    def waited_before(self, name: PhaseName, since: float) -> None:
        """It began earlier, with this phase."""
        since = min(since, self._began)
        self._starts.insert(0, (name, self.node, 1, since))
        self._began_unix_us -= round(1e6 * (self._began - since))
        self._began = since

    def enter(self, name: PhaseName, now: float) -> None:
        """The phase before ends, and this one begins. A record that is over stays as it is."""
        if not self.is_over:
            self._starts.append((name, self.node, self.n_attempts, now))

    def attempt(self, epoch: int, peer: str, slot: int | None, n_pages: int) -> None:
        """Memory is reserved here, for what is done with ``peer``; the phases from here on are this attempt's."""
        self._attempts.append(Attempt(epoch, peer, slot, n_pages, None))

    def placed(self, slot: int, n_pages: int) -> None:
        """The attempt's memory on this node, where it is known only later."""
        last = self._attempts[-1]
        self._attempts[-1] = Attempt(last.epoch, last.peer, slot, n_pages, last.failure)

    def attempt_failed(self, failure: Failure) -> None:
        """Ends the latest attempt; another one may follow (:meth:`try_again`)."""
        if self._attempts:
            last = self._attempts[-1]
            self._attempts[-1] = Attempt(last.epoch, last.peer, last.slot, last.n_pages, _failure(failure))

    def try_again(self, now: float, phase: PhaseName = PhaseName.QUEUE) -> None:
        """Another attempt begins, without memory: in ``phase`` it waits for it."""
        self.n_attempts += 1
        self.enter(phase, now)

    def join(self, half: Timings, now: float) -> None:
        """``Done`` has come: the phases since ``Reserve`` was sent are the prefill node's own, from here on.

        A clock that runs faster than this one may account for more time than has passed here: then its phases are cut.
        """
        at = next((i for i in reversed(range(len(self._starts))) if self._starts[i][0] is PhaseName.RESERVE), None)
        if at is None or self.is_over:
            return
        sent_at, n_attempt = self._starts[at][3], self._starts[at][2]
        way_s = max(0.0, now - sent_at - (half.queued_s + half.prefill_s + half.transfer_s)) / 2
        queued_at = sent_at + way_s
        computed_from = min(queued_at + half.queued_s, now)
        sent_from = min(computed_from + half.prefill_s, now)
        done_at = min(sent_from + half.transfer_s, now)
        self._starts[at + 1 :] = [
            (PhaseName.PREFILL_QUEUE, PREFILL, n_attempt, queued_at),
            (PhaseName.PREFILL, PREFILL, n_attempt, computed_from),
            (PhaseName.TRANSFER, PREFILL, n_attempt, sent_from),
            (PhaseName.DONE, self.node, n_attempt, done_at),
        ]
        self._clocks = Clocks(round(1e6 * (half.received_at - queued_at)), round(1e6 * way_s))

    def moved(self, done: Done) -> None:
        """All of the state is there."""
        timings, nbytes = done.timings, {sent.component: sent.nbytes for sent in done.sent}
        self.n_reused = done.n_reused
        self._transfer = Transfer(
            nbytes=nbytes,
            held_nbytes={sent.component: sent.held_nbytes for sent in done.sent if sent.held_nbytes},
            pieces=done.pieces,
            writing_us=round(1e6 * timings.writing_s),
            gb_s=sum(nbytes.values()) / timings.writing_s / 1e9 if timings.writing_s else None,
            compute_us=round(1e6 * timings.compute_s),
            digest_us=round(1e6 * timings.digest_s),
            chunks=timings.chunks,
        )

    def first_token(self, now: float) -> None:
        self.first_token_at = now
        self.enter(PhaseName.DECODE, now)

    def end(self, outcome: str, now: float, failure: Failure | None = None) -> None:
        """The last phase ends."""
        if not self.is_over:
            self.outcome, self.failure, self._ended_at = outcome, failure, now

    def seconds(self, *, of_last_attempt: bool = False) -> dict[PhaseName, float]:
        """Of every phase that has ended, the same phase of several attempts together, or only that of the last one."""
        found: dict[PhaseName, float] = {}
        ends = [start for _, _, _, start in self._starts[1:]]
        if self._ended_at is not None:
            ends.append(self._ended_at)
        for (name, _, n_attempt, start), end in zip(self._starts, ends, strict=False):
            if not of_last_attempt or n_attempt == self.n_attempts:
                found[name] = found.get(name, 0.0) + end - start
        return found

    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self._began

    def total_s(self) -> float | None:
        return None if self._ended_at is None else self._ended_at - self._began

    def read(self) -> RoomRecord:
        """The record as it is now. One that is over is made once: a page asks for it again and again."""
        if self._read is not None:
            return self._read
        record = self._made()
        if self.is_over:
            self._read = record
        return record

    def _made(self) -> RoomRecord:
        at_us = [*(self._us(start) for _, _, _, start in self._starts), self._us(self._ended_at)]
        phases = tuple(
            Phase(name, node, n_attempt, start_us or 0, end_us)
            for (name, node, n_attempt, _), (start_us, end_us) in zip(self._starts, pairwise(at_us), strict=True)
        )
        return RoomRecord(
            room=str(self.room),
            node=self.node,
            request_id=self.request_id,
            began_unix_us=self._began_unix_us,
            phase=None if self.is_over else phases[-1].name,
            outcome=self.outcome,
            failure=None if self.failure is None else _failure(self.failure),
            ttft_us=self._us(self.first_token_at),
            total_us=self._us(self._ended_at),
            phases=phases,
            attempts=tuple(self._attempts),
            tokens=Tokens(
                self.n_prompt,
                self.max_new,
                self.n_generated,
                self.n_steps,
                self.n_proposed,
                self.n_accepted,
                self.n_reused,
            ),
            transfer=self._transfer,
            clocks=self._clocks,
            trace_id=None if self.span is None else self.span.trace_id,
        )

    def _us(self, at: float | None) -> int | None:
        """Rounded from the beginning, never from another reading: so what touches still touches."""
        return None if at is None else max(0, round(1e6 * (at - self._began)))


RecordReader = Callable[[RoomRecorder], None]
"""Wants every record at its end, in the event loop: it must be quick, and must not raise."""


class RoomRecords:
    """The records of one ``node`` (its role): the last ``keep`` that ended. Each ``on_end`` gets every one at its end.

    ``clock`` is the node's, in seconds. With ``traces``, which gets them too, every room has a span of its own.
    """

    def __init__(self, node: str, keep: int, clock: Callable[[], float], traces: RecordReader | None = None) -> None:
        self.node = node
        self.on_end: list[RecordReader] = [] if traces is None else [traces]
        self._keep, self._is_traced = keep, traces is not None
        self._clock = clock
        self._running: dict[RoomRecorder, None] = {}
        self._ended: deque[RoomRecorder] = deque(maxlen=keep)
        self._refused: deque[Refusal] = deque(maxlen=KEPT_REFUSALS)

    def open(
        self,
        room: int,
        request_id: str,
        *,
        n_prompt: int,
        max_new: int,
        first: PhaseName,
        began: float | None = None,
        traceparent: str | None = None,
    ) -> RoomRecorder:
        """A record of a room that begins, at ``began`` or now, in the phase ``first``.

        ``traceparent`` is its caller's; without tracing here it is handed on as it is.
        """
        caller = parse_traceparent(traceparent)
        now = self._clock()
        began = now if began is None else min(began, now)
        began_unix_us = round(1e6 * (time.time() - (now - began)))
        recorder = RoomRecorder(
            self.node,
            room,
            request_id,
            n_prompt=n_prompt,
            max_new=max_new,
            began=began,
            began_unix_us=began_unix_us,
            first=first,
            span=span_below(caller) if self._is_traced else caller,
        )
        self._running[recorder] = None
        return recorder

    def end(self, recorder: RoomRecorder, outcome: str, now: float, failure: Failure | None = None) -> None:
        """Only the first end of a record counts."""
        if recorder.is_over:
            return
        recorder.end(outcome, now, failure)
        self._running.pop(recorder, None)
        self._ended.append(recorder)
        for reader in self.on_end:
            reader(recorder)

    def refused(self, request_id: str, room: int | None, failure: Failure) -> None:
        """A request that never got a room."""
        name = None if room is None else str(room)
        self._refused.append(Refusal(request_id, name, round(1e6 * time.time()), _failure(failure)))

    def listing(self, limit: int) -> RoomList:
        """The newest ``limit`` that run, that ended, and that were refused."""
        return RoomList(
            node=self.node,
            kept=self._keep,
            running=tuple(recorder.read() for recorder in islice(reversed(self._running), limit)),
            ended=tuple(recorder.read() for recorder in islice(reversed(self._ended), limit)),
            refused=tuple(islice(reversed(self._refused), limit)),
        )

    def find(self, room: int) -> RoomRecord | None:
        """The newest record of ``room``."""
        return next((recorder.read() for recorder in self._newest_first() if recorder.room == room), None)

    def _newest_first(self) -> Iterator[RoomRecorder]:
        yield from reversed(self._running)
        yield from reversed(self._ended)


def _failure(failure: Failure) -> FailureRecord:
    return FailureRecord(failure.code, failure.reason, failure.component)
