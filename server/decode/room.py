"""One room on the decode node, as a pure state machine.

    RESERVE -> QUEUED -> PREFILL -> TRANSFER -> VERIFY -> COMMITTED
       \\________\\_________\\__________\\_________\\---> ENDING -> OVER

In ENDING the room's memory is quarantined: it is free again only after ``Quiesced``, or after the node has fenced the
peer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from server.engine.request import TokenLogprob
from server.failure import Failure
from server.transfer.checks import Check
from server.transfer.parts import PROMPT_LOGPROBS, BadPart, PartsReceived
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
    Writes,
    clip,
    ids_of,
)
from server.transfer.rooms import Deadlines, Forget, GivenUp, PeerLost, Resend, RoomKey, Send, Tick


class DecodePhase(enum.StrEnum):
    """Where a room stands on the decode node."""

    RESERVE = "reserve"
    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMITTED = "committed"
    ENDING = "ending"
    OVER = "over"


_REMOTE = (DecodePhase.RESERVE, DecodePhase.QUEUED, DecodePhase.PREFILL, DecodePhase.TRANSFER)
"""Phases that end when the prefill node sends something, in their order."""
_PHASE_OF = {
    RemotePhase.QUEUED: DecodePhase.QUEUED,
    RemotePhase.PREFILL: DecodePhase.PREFILL,
    RemotePhase.TRANSFER: DecodePhase.TRANSFER,
}


Proof = TokenLogprob | Failure
"""How the check of what arrived has ended: the first token of a proved hand-off, or what is wrong."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """Memory is reserved here and the peer is chosen."""


@dataclass(frozen=True)
class Verified:
    """The check of what arrived has ended."""

    proof: Proof


@dataclass(frozen=True)
class Fenced:
    """The peer's transport session is closed: nothing it ever submitted can land any more."""


DecodeEvent = (
    Opened
    | Reserved
    | Progress
    | PromptLogprobsPart
    | Done
    | Failed
    | Quiesced
    | Verified
    | GivenUp
    | PeerLost
    | Fenced
    | Tick
)


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verify:
    """Compare what ``done`` claims, the memory itself and the prompt's log probabilities, where they are wanted, with
    what must be there (then :class:`Verified`).
    """

    done: Done
    scores: PartsReceived | None


@dataclass(frozen=True)
class Commit:
    """The state is complete and proved: decode on, after the token ``first``. ``scores`` are the rows of the prompt's
    log probabilities, None where they are not wanted.
    """

    done: Done
    first: TokenLogprob
    scores: bytearray | None = None


@dataclass(frozen=True)
class FailClient:
    """The request fails, or is tried again elsewhere. Its memory goes to quarantine."""

    failure: Failure


@dataclass(frozen=True)
class Free:
    """The room's memory may be scrubbed and used again."""


@dataclass(frozen=True)
class FencePeer:
    """Only a fence can make this room's memory safe."""

    reason: str


RequestAction = Commit | FailClient | Free
"""What concerns the request's memory and its client."""

DecodeAction = Send | Verify | Commit | FailClient | Free | FencePeer | Forget


class DecodeRoom:
    """One ``Reserve`` on the decode node, from its sending until its memory is committed or free.

    ``scores`` is where the log probabilities of the prompt's tokens come together, None if they are not wanted.
    ``handle`` is the interface.
    """

    def __init__(self, reserve: Reserve, deadlines: Deadlines, now: float, scores: PartsReceived | None = None) -> None:
        self.key = RoomKey.of(reserve)
        self.phase = DecodePhase.RESERVE
        self.failure: Failure | None = None
        self.phase_s: dict[str, float] = {}
        self._reserve, self._ids, self._scores = reserve, ids_of(reserve), scores
        self._deadlines = deadlines
        self._entered, self._alive = now, now
        self._resend = Resend(deadlines.resend_s, deadlines.resend_cap_s, now)
        self._done: Done | None = None
        self._verifying = False
        self._safe = False
        self._quiesced_at: float | None = None
        self._peer_gone = False
        self._fence_asked = False

    @property
    def active(self) -> bool:
        """Whether the room can still commit."""
        return self.phase in _REMOTE or self.phase is DecodePhase.VERIFY

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeAction]:
        """Takes one event at time ``now`` (seconds) and says what to do, in order.

        Events that come too late are ignored.
        """
        match event:
            case Opened():
                return [Send(self._reserve)]
            case Reserved():
                return self._on_sign_of_life(DecodePhase.QUEUED, now)
            case Progress():
                return self._on_sign_of_life(_PHASE_OF[event.phase], now)
            case PromptLogprobsPart():
                return self._on_part(event, now)
            case Done():
                return self._on_done(event, now)
            case Failed():
                return self._on_failed(event, now)
            case Quiesced():
                return self._on_quiesced(now)
            case Verified():
                return self._on_verified(event.proof, now)
            case GivenUp():
                return self._end(event.failure, now) if self.active else []
            case PeerLost():
                self._peer_gone = True
                return self._end(event.failure, now) if self.active else []
            case Fenced():
                self._peer_gone = self._safe = True
                return self._free_if_safe()
            case Tick():
                return self._on_tick(now)

    def _on_sign_of_life(self, phase: DecodePhase, now: float) -> list[DecodeAction]:
        if self.phase in _REMOTE:
            self._alive = now
            if _REMOTE.index(phase) > _REMOTE.index(self.phase):
                self._enter(phase, now)
        return []

    def _on_part(self, part: PromptLogprobsPart, now: float) -> list[DecodeAction]:
        if self.phase not in _REMOTE:
            return []
        self._on_sign_of_life(DecodePhase.PREFILL, now)
        try:
            if self._scores is None:
                raise BadPart("they were not asked for")
            self._scores.take(part.start, part.rows)
        except BadPart as error:
            reason = f"{PROMPT_LOGPROBS}: {error}"
            return self._end(Failure("component_mismatch", reason, PROMPT_LOGPROBS, Check.COVERAGE), now)
        return [Send(PromptLogprobsReceived(**self._ids, stop=self._scores.next))]

    def _on_done(self, done: Done, now: float) -> list[DecodeAction]:
        if self.phase in _REMOTE:
            self._done, self._verifying = done, True
            self._enter(DecodePhase.VERIFY, now)
            return [Verify(done, self._scores)]
        return [self._abort()] if self.phase is DecodePhase.ENDING and not self._peer_gone else []

    def _on_verified(self, proof: Proof, now: float) -> list[DecodeAction]:
        self._verifying = False
        if self.phase is not DecodePhase.VERIFY or self._done is None:
            return self._free_if_safe()
        if isinstance(proof, Failure):
            rejected = Rejected(**self._ids, component=proof.component, reason=clip(proof.reason))
            return [Send(rejected), *self._end(proof, now)]
        self._enter(DecodePhase.COMMITTED, now)
        scores = self._scores.rows if self._scores is not None else None
        return [Commit(self._done, proof, scores), Send(Committed(**self._ids)), Forget("committed", "")]

    def _on_failed(self, failed: Failed, now: float) -> list[DecodeAction]:
        actions: list[DecodeAction] = []
        if self.phase in _REMOTE:
            actions = self._end(failed.failure, now)
        elif self.phase is DecodePhase.ENDING and not self._peer_gone:
            actions = [self._abort()]
        if failed.writes is Writes.UNKNOWN and self.phase is DecodePhase.ENDING:
            return actions + self._fence(f"writes of {self.key} ended unknown: {failed.reason}")
        return actions

    def _on_quiesced(self, now: float) -> list[DecodeAction]:
        """In a room that goes on, the ``Failed`` before it was lost: it comes again, with the reason."""
        self._safe = True
        if self.phase in _REMOTE and self._quiesced_at is None:
            self._quiesced_at = now
        return self._free_if_safe()

    def _on_tick(self, now: float) -> list[DecodeAction]:
        silent_s = now - self._alive
        if self._quiesced_at is not None and self.phase in _REMOTE:
            if now - self._quiesced_at > self._deadlines.resend_cap_s:
                return self._end(Failure("prefill_ended", "the prefill node ended the room without a reason"), now)
        elif self.phase in _REMOTE or self.phase is DecodePhase.VERIFY:
            name = "commit" if self.phase is DecodePhase.VERIFY else self.phase.value
            limit_s: float = getattr(self._deadlines, f"{name}_s")
            if silent_s > limit_s:
                reason = f"no sign of life in phase {name} for {silent_s:.1f} s (deadline {limit_s:g} s)"
                return self._end(Failure("deadline", reason), now)
            if self.phase is DecodePhase.RESERVE and self._resend.due(now):
                return [Send(self._reserve)]
        elif self.phase is DecodePhase.ENDING and not self._safe and not self._peer_gone:
            if silent_s > self._deadlines.quiesce_s:
                return self._fence(f"{self.key} was not quiesced within {self._deadlines.quiesce_s:g} s of its abort")
            if self._resend.due(now):
                return [self._abort()]
        return []

    def _end(self, failure: Failure, now: float) -> list[DecodeAction]:
        self.failure = failure
        self._enter(DecodePhase.ENDING, now)
        self._resend = Resend(self._deadlines.resend_s, self._deadlines.resend_cap_s, now)
        actions: list[DecodeAction] = [FailClient(failure)]
        if not self._peer_gone:
            actions.append(self._abort())
        return actions + self._free_if_safe()

    def _free_if_safe(self) -> list[DecodeAction]:
        if self.phase is not DecodePhase.ENDING or not self._safe or self._verifying or self.failure is None:
            return []
        self.phase = DecodePhase.OVER
        outcome = "aborted" if self.failure.code == "aborted" else "failed"
        return [Free(), Forget(outcome, self.failure.code)]

    def _fence(self, reason: str) -> list[DecodeAction]:
        if self._fence_asked or self._peer_gone:
            return []
        self._fence_asked = True
        return [FencePeer(reason)]

    def _enter(self, phase: DecodePhase, now: float) -> None:
        self.phase_s[self.phase.value] = now - self._entered
        self.phase, self._entered, self._alive = phase, now, now

    def _abort(self) -> Send:
        reason = self.failure.reason if self.failure is not None else ""
        return Send(Abort(**self._ids, reason=clip(reason)))
