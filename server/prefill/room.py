"""One room on the prefill node, as a pure state machine.

    QUEUED -> PREFILL -> TRANSFER -> COMMIT -> COMMITTED
       \\________\\__________\\__________\\----> ENDING

From PREFILL it goes back to QUEUED once, if what the cache gave for its prompt is damaged.
``Quiesced`` is sent only when the engine and the sender are both idle and every piece ended applied or refused.
"""

from __future__ import annotations

import enum
from collections import Counter

from server.cache.digest import PageRanges, StateParts
from server.engine.prompt_logprobs import row_nbytes
from server.failure import Failure
from server.prefill.events import (
    Admitted,
    Advanced,
    BatchEnded,
    CacheDamaged,
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
    QueueAgain,
    QueueMoved,
    Release,
    Scored,
    SenderGone,
)
from server.transfer.parts import PROMPT_LOGPROBS, Part, PartsToSend
from server.transfer.plan import Rows
from server.transfer.protocol import (
    Abort,
    Committed,
    Done,
    Failed,
    Progress,
    PromptLogprobsPart,
    PromptLogprobsReceived,
    Quiesced,
    Rejected,
    RemotePhase,
    Reserve,
    Reserved,
    Sent,
    SentPromptLogprobs,
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


class PrefillRoom:
    """One ``Reserve`` on the prefill node, from its arrival to the tombstone. ``handle`` is the whole interface."""

    def __init__(self, reserve: Reserve, n_tokens: int, deadlines: Deadlines, now: float) -> None:
        self.key = RoomKey.of(reserve)
        self.reserve, self._ids = reserve, ids_of(reserve)
        self.phase = PrefillPhase.QUEUED
        self.failure: Failure | None = None
        self.phase_s: dict[str, float] = {}
        self.n_tokens = n_tokens
        self.n_reused = 0
        """Tokens of the prompt that the cache had the state of."""
        self._deadlines = deadlines
        self.done: Done | None = None
        self._computed: Computed | None = None
        self._n_computed = 0
        self._engine_busy = False
        self._holds_memory = False
        self._batches: set[int] = set()
        self._tail_pushed = False
        self._writes_ended = True
        self._pieces: Counter[str] = Counter()
        self._sent: dict[str, Rows] = {}
        self._held: PageRanges = ()
        self._n_chunks = 0
        self._received_at = now
        self._writing_s, self._writing_since = 0.0, now
        n_top = reserve.request.sampling.prompt_logprobs
        self._parts = None if n_top is None else PartsToSend(row_nbytes(n_top), first=1)
        """The prompt's log probabilities, if the decode node wants them."""
        self._parts_resend = Resend(deadlines.resend_s, deadlines.resend_cap_s, now)
        self._entered, self._alive, self._reported = now, now, now
        self._resend = Resend(deadlines.resend_s, deadlines.resend_cap_s, now)
        self._progress_s = min(1.0, reserve.silence_s / 3)
        self.acknowledged = False
        """The decode node has said that it knows of the room's end, or is not there any more."""
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
            case PromptLogprobsReceived():
                return self._on_parts_received(event.stop, now)
            case Rejected():
                rejection = Failure("rejected", event.reason, event.component)
                return self._end(rejection, now, report=False) if self.active else []
            case GivenUp():
                return self._end(event.failure, now) if self.active else []
            case Admitted():
                self._engine_busy = self._holds_memory = True
                self.n_reused = event.n_reused
                self._enter(PrefillPhase.PREFILL, now)
                return [self._progress(now)]
            case CacheDamaged():
                return self._on_cache_damaged(now)
            case QueueMoved():
                if self.phase is PrefillPhase.QUEUED:
                    self._alive = now
                return []
            case Advanced():
                return self._on_advanced(event.n_computed, now)
            case Scored():
                return self._on_scored(event.rows, now)
            case Computed():
                return self._on_computed(event, now)
            case EngineIdle():
                return self._on_engine_idle(event, now)
            case Pushed():
                return self._on_pushed(event, now)
            case BatchEnded():
                return self._on_batch_ended(event, now)
            case SenderGone():
                self._writes_ended = self._writes_ended and not self._batches
                self._batches.clear()
                return self._settle(now)
            case Cleaned():
                self._holds_memory = False
                return [Release(), *self._forget_if_over()]
            case PeerLost():
                self._peer_gone = self.acknowledged = True
                actions = self._end(event.failure, now) if self.active else self._forget_if_over()
                return [action for action in actions if not isinstance(action, Send)]
            case Tick():
                return self._on_tick(now)

    @property
    def active(self) -> bool:
        """Whether the room can still commit."""
        return self.phase in _ACTIVE

    def _on_abort(self, abort: Abort, now: float) -> list[PrefillAction]:
        self.acknowledged = True
        if self.active:
            return self._end(Failure("aborted", abort.reason), now, report=False)
        if not self._settled:
            return []
        return [self._verdict(), *self._forget_if_over()]

    def _on_committed(self, now: float) -> list[PrefillAction]:
        if self.phase is not PrefillPhase.COMMIT:
            return []
        self._enter(PrefillPhase.COMMITTED, now)
        self.acknowledged = self._settled = True
        return [Clean()]

    def _on_cache_damaged(self, now: float) -> list[PrefillAction]:
        self._engine_busy = False
        if self.phase is not PrefillPhase.PREFILL:
            return self._settle(now)
        self._holds_memory = False
        self.n_reused = 0
        self._enter(PrefillPhase.QUEUED, now)
        return [QueueAgain()]

    def _on_advanced(self, n_computed: int, now: float) -> list[PrefillAction]:
        if self.phase is not PrefillPhase.PREFILL:
            return []
        self._n_computed, self._alive = n_computed, now
        self._n_chunks += n_computed > self.n_reused  # the first report may be of the cache's part alone
        return [PushPages(n_computed), self._progress(now)]

    def _on_scored(self, rows: bytes, now: float) -> list[PrefillAction]:
        if self.phase is not PrefillPhase.PREFILL or self._parts is None:
            return []
        self._alive = now
        parts = self._parts
        parts.add(rows)
        if not parts.is_under_way:
            self._restart_parts_resend(now)
        return [self._part(part) for part in parts.next()]

    def _on_parts_received(self, stop: int, now: float) -> list[PrefillAction]:
        parts = self._parts
        if parts is None or not self.active or not parts.arrived(stop):
            return []
        self._alive = now
        self._restart_parts_resend(now)
        return [*(self._part(part) for part in parts.next()), *self._finish_transfer(now)]

    def _restart_parts_resend(self, now: float) -> None:
        self._parts_resend = Resend(self._deadlines.resend_s, self._deadlines.resend_cap_s, now)

    def _part(self, part: Part) -> Send:
        return Send(PromptLogprobsPart(**self._ids, start=part.start, rows=part.rows))

    def _on_computed(self, computed: Computed, now: float) -> list[PrefillAction]:
        self._engine_busy = False
        if self.phase is not PrefillPhase.PREFILL:
            return self._settle(now)
        self._n_chunks += self._n_computed < self.n_tokens
        self._computed, self._n_computed = computed, self.n_tokens
        self._enter(PrefillPhase.TRANSFER, now)
        self._reported = now - self._progress_s  # due at the next tick: most transfers are over by then
        return [PushTail()]

    def _on_engine_idle(self, event: EngineIdle, now: float) -> list[PrefillAction]:
        self._engine_busy = False
        if self.active:
            return self._end(event.failure or Failure("engine_stopped", "the prefill engine gave the room up"), now)
        return self._settle(now)

    def _on_pushed(self, pushed: Pushed, now: float) -> list[PrefillAction]:
        if pushed.batch_id is not None:
            self._writing_since = self._writing_since if self._batches else now
            self._batches.add(pushed.batch_id)
        self._pieces.update(pushed.pieces)
        self._tail_pushed = self._tail_pushed or pushed.last
        for rows in pushed.rows:
            before = self._sent.get(rows.component)
            if before is not None:
                nbytes, held_nbytes = before.nbytes + rows.nbytes, before.held_nbytes + rows.held_nbytes
                rows = Rows(rows.component, before.start, rows.stop, nbytes, held_nbytes)
            self._sent[rows.component] = rows
        self._held = pushed.held
        return self._finish_transfer(now)

    def _on_batch_ended(self, ended: BatchEnded, now: float) -> list[PrefillAction]:
        if ended.batch_id not in self._batches:
            return []
        self._batches.discard(ended.batch_id)
        if not self._batches:
            self._writing_s += now - self._writing_since
        self._writes_ended = ended.quiesced  # of all batches: the last result decides
        self._alive = now
        if ended.failure is not None and self.active:
            return self._end(ended.failure, now)
        return self._finish_transfer(now) if self.active else self._settle(now)

    def _finish_transfer(self, now: float) -> list[PrefillAction]:
        """``Done``, once everything was pushed, every batch was applied and every part of the rest was answered."""
        if self.phase is not PrefillPhase.TRANSFER or not self._tail_pushed or self._batches:
            return []
        parts = self._parts
        if parts is not None and not parts.have_all_arrived:
            return []
        if parts is not None and parts.stop != self.n_tokens:
            reason = f"the engine reported log probabilities up to position {parts.stop - 1} of {self.n_tokens} tokens"
            return self._end(Failure("no_digest", reason, PROMPT_LOGPROBS), now)
        computed = self._computed
        if computed is None or any(name not in computed.parts.parts for name in self.reserve.components):
            return self._end(Failure("no_digest", "the engine reported no digest of a wanted component"), now)
        self._enter(PrefillPhase.COMMIT, now)
        self._resend = Resend(self._deadlines.resend_s, self._deadlines.resend_cap_s, now)
        self.done = Done(
            **self._ids,
            n=self.n_tokens,
            held=self._held,
            n_reused=self.n_reused,
            sent=tuple(_sent(rows, computed.parts, self._held) for rows in self._sent.values()),
            pieces=dict(self._pieces),
            timings=Timings(
                received_at=self._received_at,
                queued_s=self.phase_s["queued"],
                prefill_s=self.phase_s["prefill"],
                transfer_s=self.phase_s["transfer"],
                compute_s=computed.prefill_s,
                digest_s=computed.digest_s,
                writing_s=self._writing_s,
                chunks=self._n_chunks,
            ),
            prompt_logprobs=None if parts is None else SentPromptLogprobs(parts.stop - 1, parts.digest),
        )
        return [Send(self.done)]

    def _on_tick(self, now: float) -> list[PrefillAction]:
        silent_s = now - self._alive
        match self.phase:
            case PrefillPhase.QUEUED | PrefillPhase.PREFILL | PrefillPhase.TRANSFER:
                limit_s: float = getattr(self._deadlines, f"{self.phase}_s")
                if silent_s > limit_s:
                    return self._end(_late(self.phase, "nothing moved", silent_s, limit_s), now)
                parts = self._parts
                actions: list[PrefillAction] = []
                if parts is not None and parts.is_under_way and self._parts_resend.due(now):
                    actions += [self._part(part) for part in parts.again()]
                if now - self._reported >= self._progress_s:
                    actions.append(self._progress(now))
                return actions
            case PrefillPhase.COMMIT:
                if silent_s > self._deadlines.commit_s:
                    late = _late(self.phase, "Done was not answered", silent_s, self._deadlines.commit_s)
                    return self._end(late, now)
                if self.done is not None and self._resend.due(now):
                    return [Send(self.done)]
            case PrefillPhase.ENDING if not self.acknowledged:
                if silent_s > self._deadlines.quiesce_s:
                    self.acknowledged = True
                    return self._forget_if_over()
                if self._resend.due(now):
                    return [self._send_state()]
            case _:
                pass
        return []

    def _end(self, failure: Failure, now: float, *, report: bool = True) -> list[PrefillAction]:
        """Gives the room up: reports it to the peer at once, stops engine and sender, settles when both are idle."""
        self.failure = failure
        self._enter(PrefillPhase.ENDING, now)
        self._resend = Resend(self._deadlines.resend_s, self._deadlines.resend_cap_s, now)
        actions: list[PrefillAction] = [self._send_state()] if report else []
        if self._engine_busy:
            actions.append(CancelEngine())
        if self._batches:
            actions.append(CancelPush())
        return actions + self._settle(now)

    def _settle(self, now: float) -> list[PrefillAction]:
        if self.phase is not PrefillPhase.ENDING or self._settled or self._engine_busy or self._batches:
            return []
        self._settled = True
        self._alive = now
        actions: list[PrefillAction] = [] if self._peer_gone else [self._verdict()]
        return actions + ([Clean()] if self._holds_memory else self._forget_if_over())

    def _forget_if_over(self) -> list[PrefillAction]:
        if not (self._settled and self.acknowledged) or self._holds_memory:
            return []
        if self.failure is None:
            return [Forget("committed", "")]
        outcome = "aborted" if self.failure.code == "aborted" else "failed"
        return [Forget(outcome, self.failure.code, self._writes_ended)]

    def _enter(self, phase: PrefillPhase, now: float) -> None:
        self.phase_s[self.phase.value] = self.phase_s.get(self.phase.value, 0.0) + now - self._entered
        self.phase, self._entered, self._alive = phase, now, now

    def _send_state(self) -> Send:
        """The answer to a repeated ``Reserve``. What became of the writes is known when the last batch has ended."""
        if self.failure is None:
            return Send(Reserved(**self._ids))
        writes = Writes.SETTLING if self._writes_ended or self._batches else Writes.UNKNOWN
        return Send(failed_message(self.reserve, self.failure, writes))

    def _verdict(self) -> Send:
        """What a settled room says about its writes."""
        return Send(Quiesced(**self._ids)) if self._writes_ended else self._send_state()

    def _progress(self, now: float) -> Send:
        self._reported = now
        return Send(Progress(**self._ids, phase=RemotePhase(self.phase.value), n_computed=self._n_computed))


def failed_message(about: Reserve | Waiting | Abort, failure: Failure, writes: Writes) -> Failed:
    """``failure`` as the message to the decode node."""
    return Failed(
        **ids_of(about),
        code=failure.code,
        reason=clip(failure.reason),
        kind=failure.kind,
        component=failure.component,
        writes=writes,
    )


def _sent(rows: Rows, parts: StateParts, held: PageRanges) -> Sent:
    digest, held_digest = parts.split(rows.component, held)
    return Sent(rows.component, rows.start, rows.stop, rows.nbytes, digest, rows.held_nbytes, held_digest)


def _late(phase: PrefillPhase, what: str, silent_s: float, limit_s: float) -> Failure:
    reason = f"phase {phase} on the prefill node: {what} for {silent_s:.1f} s (deadline {limit_s:g} s)"
    return Failure("deadline", reason)
