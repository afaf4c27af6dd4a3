"""One attempt at a request on the decode node."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from server.cache.layout import Placement
from server.cache.prefix import CachedPage, PromptKeys
from server.decode.prefill_link import PrefillLink
from server.decode.room import DecodePhase, DecodeRoom
from server.decode.verify import PREFIX_DAMAGED, Expected
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest
from server.failure import Failure
from server.telemetry.rooms import RoomRecorder
from server.transfer.checks import Check
from server.transfer.frames import pack_tokens
from server.transfer.protocol import Registration, Sampling
from server.transfer.rooms import RoomKey

MAX_RETRIES = 1
"""On another prefill node."""


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

    ``sampling`` is the request's as the prefill node gets it. ``link`` is the prefill node that a router chose, or the
    one that is asked again; else it is chosen together with the memory. ``resumed``: the engine decodes in the room's
    memory, and says when it does no more. ``scores`` are the rows of the prompt's log probabilities, where they are
    computed here.

    ``offered`` are cached pages that the prompt begins with, pinned until its state is proved; there are none unless it
    ``may_offer``. ``keys`` are those of the prompt's pages. ``expected`` is what its room waits for.

    A further attempt has the same ``generation``, ``avoids`` the prefill nodes that failed, and says why the one before
    ``failed_before``. All write the same ``record``. This attempt began to wait at ``enqueued_at``, in seconds of the
    node's clock.
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
    n_retries: int = 0
    may_offer: bool = True
    keys: PromptKeys | None = None
    placement: Placement | None = None
    offered: tuple[CachedPage, ...] = ()
    room: DecodeRoom | None = None
    expected: Expected | None = None
    skipped: frozenset[Check] = frozenset()
    resumed: bool = False
    scores: bytearray = field(default_factory=bytearray)

    @cached_property
    def packed_prompt(self) -> bytes:
        """The prompt's ids as little-endian int32."""
        return pack_tokens(self.request.prompt_ids)

    @property
    def is_committed(self) -> bool:
        return self.room is not None and self.room.phase is DecodePhase.COMMITTED

    def may_be_retried(self, failure: Failure) -> bool:
        """Whether ``failure`` is not the request's own fault, and somebody still waits for the answer: once because of
        a prefill node, and once because of pages of this node.

        A router tries another prefill node itself, with another room, also after damage here: the damaged pages are
        forgotten by then, and the prefill node has told its client of the failure already.
        """
        if not failure.kind.may_be_retried or self.request.routed is not None or self.generation.ended:
            return False
        return self.may_offer if failure.code == PREFIX_DAMAGED else len(self.avoids) < MAX_RETRIES

    def next_attempt(self, key: RoomKey, link: PrefillLink, failure: Failure, now: float) -> DecodeRequest:
        """The same request once more, after ``failure`` with ``link``: ``key`` has a new epoch, memory is open.

        If only pages of this node were damaged, ``link`` is asked again, and nothing is offered any more.
        """
        is_here = failure.code == PREFIX_DAMAGED
        return DecodeRequest(
            key,
            self.request,
            self.sampling,
            self.generation,
            self.record,
            now,
            link=link if is_here else None,
            avoids=self.avoids if is_here else (*self.avoids, link),
            failed_before=failure,
            n_retries=self.n_retries + 1,
            may_offer=self.may_offer and not is_here,
            keys=self.keys,
        )
