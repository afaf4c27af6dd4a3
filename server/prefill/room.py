"""One room on the prefill node, as a pure state machine.

    QUEUED -> PREFILL -> TRANSFER -> COMMIT -> COMMITTED
       \\________\\__________\\__________\\----> ENDING

``Quiesced`` is said only when the engine and the sender are both idle and every piece ended applied or refused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from server.failure import Failure
from server.prefill.room_events import (
    Admitted,
    Advanced,
    BatchEnded,
    CancelEngine,
    CancelPush,
    Clean,
    Cleaned,
    Computed,
    EngineIdle,
    PrefillAction,
    PrefillEvent,
    Pushed,
    PushPages,
    PushTail,
    QueueMoved,
    Release,
    SenderGone,
)
from server.transfer.protocol import (
    Abort,
    Committed,
    Done,
    Failed,
    Progress,
    Quiesced,
    Rejected,
    RemotePhase,
    Reserve,
    Reserved,
    RoomIds,
    Sent,
    Timings,
    Waiting,
    Writes,
    clip,
    ids_of,
)
from server.transfer.rooms import Deadlines, Forget, GivenUp, PeerLost, Resend, RoomKey, Send, Tick


class PrefillPhase(enum.StrEnum):
    """Where a room stands on the prefill node."""

    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    COMMIT = "commit"
    COMMITTED = "committed"
    ENDING = "ending"


_ACTIVE = (PrefillPhase.QUEUED, PrefillPhase.PREFILL, PrefillPhase.TRANSFER, PrefillPhase.COMMIT)


@dataclass
class _Tally:
    """What was sent of one component so far."""

    start: int
    stop: int
    nbytes: int


@dataclass
class _Work:
    """What of the room is still moving."""

    engine_busy: bool = False
    holds_memory: bool = False
    batches: set[int] = field(default_factory=set)
    tail_pushed: bool = False
    clean: bool = True
    n_pieces: int = 0
    sent: dict[str, _Tally] = field(default_factory=dict)


class PrefillRoom:
    """One ``Reserve`` on the prefill node, from its arrival to the tombstone. ``handle`` is the whole interface."""

    def __init__(self, reserve: Reserve, n_tokens: int, deadlines: Deadlines, now: float) -> None:
        self.key = RoomKey(reserve.room, reserve.epoch, reserve.decode)
        self.reserve = reserve
        self.phase = PrefillPhase.QUEUED
        self.failure: Failure | None = None
        self.phase_s: dict[str, float] = {}
        self.n_tokens = n_tokens
        self._deadlines = deadlines
        self._work = _Work()
        self._computed: Computed | None = None
        self.done: Done | None = None
        self._n_computed = 0
        self._entered, self._alive, self._told = now, now, now
        self._resend = Resend(deadlines.resend_s, deadlines.resend_cap_s, now)
        self._progress_s = min(1.0, reserve.silence_s / 3)
        self._acknowledged = False
        self._settled = False
        self._peer_gone = False

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillAction]:
        """Takes one event at time ``now`` (seconds) and says what to do, in order.

        Events that come too late are ignored.
        """
        match event:
            case Reserve():
                return [self._send_state()]
            case Abort():
                return self._on_abort(event, now)
            case Committed():
                return self._on_committed(now)
            case Rejected():
                rejection = Failure("rejected", event.reason, event.component)
                return self._end(rejection, now, tell=False) if self.active else []
            case GivenUp():
                return self._end(event.failure, now) if self.active else []
            case Admitted():
                self._work.engine_busy = self._work.holds_memory = True
                self._enter(PrefillPhase.PREFILL, now)
                return [self._progress(now)]
            case QueueMoved():
                if self.phase is PrefillPhase.QUEUED:
                    self._alive = now
                return []
            case Advanced():
                return self._on_advanced(event.n_computed, now)
            case Computed():
                return self._on_computed(event, now)
            case EngineIdle():
                return self._on_engine_idle(event, now)
            case Pushed():
                return self._on_pushed(event, now)
            case BatchEnded():
                return self._on_batch_ended(event, now)
            case SenderGone():
                self._work.clean = self._work.clean and not self._work.batches
                self._work.batches.clear()
                return self._settle(now)
            case Cleaned():
                self._work.holds_memory = False
                return [Release(), *self._forget_if_over()]
            case PeerLost():
                self._peer_gone = self._acknowledged = True
                actions = self._end(event.failure, now) if self.active else self._forget_if_over()
                return [action for action in actions if not isinstance(action, Send)]
            case Tick():
                return self._on_tick(now)

    @property
    def active(self) -> bool:
        """Whether the room can still commit."""
        return self.phase in _ACTIVE

    @property
    def is_known(self) -> bool:
        """Whether the decode node has said that it knows of the room's end, or is not there any more."""
        return self._acknowledged

    def _on_abort(self, abort: Abort, now: float) -> list[PrefillAction]:
        self._acknowledged = True
        if self.active:
            return self._end(Failure("aborted", abort.reason), now, tell=False)
        if not self._settled:
            return []
        return [self._verdict(), *self._forget_if_over()]

    def _on_committed(self, now: float) -> list[PrefillAction]:
        if self.phase is not PrefillPhase.COMMIT:
            return []
        self._enter(PrefillPhase.COMMITTED, now)
        self._acknowledged = self._settled = True
        return [Clean()]

    def _on_advanced(self, n_computed: int, now: float) -> list[PrefillAction]:
        if self.phase is not PrefillPhase.PREFILL:
            return []
        self._n_computed, self._alive = n_computed, now
        return [PushPages(n_computed), self._progress(now)]

    def _on_computed(self, computed: Computed, now: float) -> list[PrefillAction]:
        self._work.engine_busy = False
        if self.phase is not PrefillPhase.PREFILL:
            return self._settle(now)
        self._computed, self._n_computed = computed, self.n_tokens
        self._enter(PrefillPhase.TRANSFER, now)
        return [PushTail(), self._progress(now)]

    def _on_engine_idle(self, event: EngineIdle, now: float) -> list[PrefillAction]:
        self._work.engine_busy = False
        if self.active:
            return self._end(event.failure or Failure("engine_stopped", "the prefill engine gave the room up"), now)
        return self._settle(now)

    def _on_pushed(self, pushed: Pushed, now: float) -> list[PrefillAction]:
        work = self._work
        if pushed.batch_id is not None:
            work.batches.add(pushed.batch_id)
        work.n_pieces += pushed.n_pieces
        work.tail_pushed = work.tail_pushed or pushed.last
        for rows in pushed.rows:
            tally = work.sent.setdefault(rows.component, _Tally(rows.start, rows.start, 0))
            tally.stop, tally.nbytes = rows.stop, tally.nbytes + rows.nbytes
        return self._finish_transfer(now)

    def _on_batch_ended(self, ended: BatchEnded, now: float) -> list[PrefillAction]:
        if ended.batch_id not in self._work.batches:
            return []
        self._work.batches.discard(ended.batch_id)
        self._work.clean = ended.quiesced  # of all batches: the last result decides
        self._alive = now
        if ended.failure is not None and self.active:
            return self._end(ended.failure, now)
        return self._finish_transfer(now) if self.active else self._settle(now)

    def _finish_transfer(self, now: float) -> list[PrefillAction]:
        """``Done``, once everything was pushed and every batch was applied."""
        if self.phase is not PrefillPhase.TRANSFER or not self._work.tail_pushed or self._work.batches:
            return []
        computed = self._computed
        if computed is None or any(name not in computed.digests for name in self.reserve.components):
            return self._end(Failure("no_digest", "the engine reported no digest of a wanted component"), now)
        self._enter(PrefillPhase.COMMIT, now)
        self._resend = Resend(self._deadlines.resend_s, self._deadlines.resend_cap_s, now)
        self.done = Done(
            **self._ids(),
            n=self.n_tokens,
            sent=tuple(
                Sent(name, tally.start, tally.stop, tally.nbytes, computed.digests[name])
                for name, tally in self._work.sent.items()
            ),
            pieces=self._work.n_pieces,
            timings=Timings(
                queued_s=self.phase_s["queued"],
                prefill_s=computed.prefill_s,
                digest_s=computed.digest_s,
                transfer_s=self.phase_s["transfer"],
            ),
        )
        return [Send(self.done)]

    def _on_tick(self, now: float) -> list[PrefillAction]:
        silent_s = now - self._alive
        match self.phase:
            case PrefillPhase.QUEUED | PrefillPhase.PREFILL | PrefillPhase.TRANSFER:
                limit_s: float = getattr(self._deadlines, f"{self.phase}_s")
                if silent_s > limit_s:
                    return self._end(_late(self.phase, "nothing moved", silent_s, limit_s), now)
                if now - self._told >= self._progress_s:
                    return [self._progress(now)]
            case PrefillPhase.COMMIT:
                if silent_s > self._deadlines.commit_s:
                    late = _late(self.phase, "Done was not answered", silent_s, self._deadlines.commit_s)
                    return self._end(late, now)
                if self.done is not None and self._resend.due(now):
                    return [Send(self.done)]
            case PrefillPhase.ENDING if not self._acknowledged:
                if silent_s > self._deadlines.quiesce_s:
                    self._acknowledged = True
                    return self._forget_if_over()
                if self._resend.due(now):
                    return [self._send_state()]
            case _:
                pass
        return []

    def _end(self, failure: Failure, now: float, *, tell: bool = True) -> list[PrefillAction]:
        """Gives the room up: tells the peer at once, stops engine and sender, settles when both are idle."""
        self.failure = failure
        self._enter(PrefillPhase.ENDING, now)
        self._resend = Resend(self._deadlines.resend_s, self._deadlines.resend_cap_s, now)
        actions: list[PrefillAction] = [self._send_state()] if tell else []
        if self._work.engine_busy:
            actions.append(CancelEngine())
        if self._work.batches:
            actions.append(CancelPush())
        return actions + self._settle(now)

    def _settle(self, now: float) -> list[PrefillAction]:
        work = self._work
        if self.phase is not PrefillPhase.ENDING or self._settled or work.engine_busy or work.batches:
            return []
        self._settled = True
        self._alive = now
        actions: list[PrefillAction] = [] if self._peer_gone else [self._verdict()]
        return actions + ([Clean()] if work.holds_memory else self._forget_if_over())

    def _forget_if_over(self) -> list[PrefillAction]:
        if not (self._settled and self._acknowledged) or self._work.holds_memory:
            return []
        if self.failure is None:
            return [Forget("committed", "")]
        outcome = "aborted" if self.failure.code == "aborted" else "failed"
        return [Forget(outcome, self.failure.code, self._work.clean)]

    def _enter(self, phase: PrefillPhase, now: float) -> None:
        self.phase_s[self.phase.value] = now - self._entered
        self.phase, self._entered, self._alive = phase, now, now

    def _send_state(self) -> Send:
        """The answer to a repeated ``Reserve``. What became of the writes is known when the last batch has ended."""
        if self.failure is None:
            return Send(Reserved(**self._ids()))
        writes = Writes.SETTLING if self._work.clean or self._work.batches else Writes.UNKNOWN
        return Send(failed_message(self.reserve, self.failure, writes))

    def _verdict(self) -> Send:
        """What a settled room says about its writes."""
        return Send(Quiesced(**self._ids())) if self._work.clean else self._send_state()

    def _progress(self, now: float) -> Send:
        self._told = now
        return Send(Progress(**self._ids(), phase=RemotePhase(self.phase.value), n_computed=self._n_computed))

    def _ids(self) -> RoomIds:
        return ids_of(self.reserve)


def failed_message(about: Reserve | Waiting | Abort, failure: Failure, writes: Writes) -> Failed:
    """``failure`` as the message that tells the decode node."""
    return Failed(
        **ids_of(about),
        code=failure.code,
        reason=clip(failure.reason),
        kind=failure.kind,
        component=failure.component,
        writes=writes,
    )


def _late(phase: PrefillPhase, what: str, silent_s: float, limit_s: float) -> Failure:
    reason = f"phase {phase} on the prefill node: {what} for {silent_s:.1f} s (deadline {limit_s:g} s)"
    return Failure("deadline", reason)
