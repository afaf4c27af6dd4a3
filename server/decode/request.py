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
from server.telemetry.rooms import RoomRecorder
from server.transfer.checks import Check
from server.transfer.protocol import Registration, Sampling
from server.transfer.rooms import RoomKey

MAX_RETRIES = 1


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
    ``failed_before``. Both write the same ``record``. ``expected`` is what its room waits for. This attempt began to
    wait at ``enqueued_at``, in seconds of the node's clock.
    """

    key: RoomKey
    request: GenerationRequest
    sampling: Sampling
    generation: NodeGeneration
    record: RoomRecorder
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
            self.record,
            now,
            avoids=(*self.avoids, link),
            failed_before=failure,
        )
