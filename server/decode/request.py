"""One attempt at a request on the decode node."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.cache.layout import Placement
from server.decode.prefill_link import PrefillLink
from server.decode.room import DecodePhase, DecodeRoom
from server.decode.verify import Expected
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest
from server.failure import Failure
from server.node.request_log import RequestEnd
from server.transfer.checks import Check
from server.transfer.protocol import Registration, Sampling, Timings
from server.transfer.rooms import RoomKey

MAX_RETRIES = 1
_QUEUED = ("reserve", "queued")
"""Phases of a room in which its prompt waits on the prefill node."""


@dataclass
class Announced:
    """That the prefill node of a routed room knows of it in ``registration``: since ``since``, last reminded at ``at``.

    ``has_arrived``: the router's request has come there, as :class:`RequestArrived` says.
    """

    registration: Registration
    since: float
    at: float
    has_arrived: bool = False


@dataclass(eq=False)
class DecodeRequest:
    """One attempt at a request, from its admission until its memory is free again.

    ``sampling`` is the request's as the prefill node gets it. ``link`` is the prefill node that a router chose; else it
    is chosen together with the memory. ``resumed``: the engine decodes in the room's memory, and says when it does no
    more. ``scores`` are the rows of the prompt's log probabilities, where they are computed here.

    A second attempt has the same ``generation``, ``avoids`` the prefill nodes of those before and says why they
    ``failed_before``. ``expected`` is what its room waits for.

    Times are seconds of the node's clock: the request came at ``submitted_at``, this attempt began to wait at
    ``enqueued_at``, got memory at ``opened_at``, and decoding began at ``decoding_at``. ``prefill_timings`` is where
    the prefill node says that its time went.
    """

    key: RoomKey
    request: GenerationRequest
    sampling: Sampling
    generation: NodeGeneration
    submitted_at: float
    enqueued_at: float
    link: PrefillLink | None = None
    announced: Announced | None = None
    avoids: tuple[PrefillLink, ...] = ()
    failed_before: Failure | None = None
    placement: Placement | None = None
    room: DecodeRoom | None = None
    expected: Expected | None = None
    skipped: frozenset[Check] = frozenset()
    resumed: bool = False
    scores: bytearray = field(default_factory=bytearray)
    n_generated: int = 0
    opened_at: float | None = None
    decoding_at: float | None = None
    prefill_timings: Timings | None = None

    @property
    def n_retries(self) -> int:
        return len(self.avoids)

    @property
    def is_committed(self) -> bool:
        return self.room is not None and self.room.phase is DecodePhase.COMMITTED

    def may_be_retried(self, failure: Failure) -> bool:
        """Whether ``failure`` is not the request's own fault, and somebody still waits for the answer.

        A router tries another prefill node itself, with another room.
        """
        may_be = failure.kind.may_be_retried and self.request.routed is None
        return may_be and self.n_retries < MAX_RETRIES and not self.generation.ended

    def next_attempt(self, key: RoomKey, link: PrefillLink, failure: Failure, now: float) -> DecodeRequest:
        """The same request once more, after ``failure`` with ``link``: ``key`` has a new epoch, memory is open."""
        return DecodeRequest(
            key,
            self.request,
            self.sampling,
            self.generation,
            self.submitted_at,
            now,
            avoids=(*self.avoids, link),
            failed_before=failure,
        )

    def end(self, outcome: str, now: float) -> RequestEnd:
        """What is logged of the request. What failed attempts took counts as time in the queue."""
        timings = self.prefill_timings
        opened_at = now if self.opened_at is None else self.opened_at
        decoding_at = now if self.decoding_at is None else self.decoding_at
        queue_s = opened_at - self.submitted_at
        if timings is not None:  # the prefill node knows better than what was heard of it, and when
            queue_s, prefill_s = queue_s + timings.queued_s, timings.prefill_s
            transfer_s = max(0.0, decoding_at - opened_at - timings.queued_s - timings.prefill_s)
        elif self.room is not None:
            room_s = self.room.phase_s
            queue_s += sum(room_s.get(phase, 0.0) for phase in _QUEUED)
            prefill_s = room_s.get("prefill", 0.0)
            transfer_s = room_s.get("transfer", 0.0) + room_s.get("verify", 0.0)
        else:
            prefill_s, transfer_s = decoding_at - opened_at, 0.0
        return RequestEnd(
            request_id=self.request.request_id,
            room=None if self.room is None and self.request.routed is None else self.key.room,
            peer_role="prefill",
            peer=self.link.address if self.link is not None else "none" if self.opened_at is None else "local",
            n_prompt=len(self.request.prompt_ids),
            n_generated=self.n_generated,
            phase_s={"queue": queue_s, "prefill": prefill_s, "transfer": transfer_s, "decode": now - decoding_at},
            outcome=outcome,
            n_retries=self.n_retries,
        )
