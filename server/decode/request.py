"""One attempt at a request on the decode node, and what its room tells the node."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Protocol

from server.cache.layout import Placement
from server.decode.prefill_link import PrefillLink
from server.decode.room import DecodeRoom
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest, TokenLogprob
from server.failure import Failure
from server.node.request_log import RequestEnd
from server.transfer.checks import Check
from server.transfer.protocol import Done, Timings
from server.transfer.rooms import RoomKey

_QUEUED = ("reserve", "pair", "queued")
"""Phases of a room in which its prompt waits on the prefill node."""


@dataclass
class Times:
    """When a request came, when its last attempt got memory, and when decoding began, on ``time.monotonic()``.

    ``at_prefill`` is where the prefill node says that its time went.
    """

    submitted: float
    opened: float | None = None
    decoding: float | None = None
    at_prefill: Timings | None = None


@dataclass(eq=False)
class DecodeRequest:
    """One attempt at a request, from its admission until its memory is free again.

    A second attempt has the same ``generation``, ``avoids`` the prefill nodes of those before and says why they
    ``failed_before``. ``enqueued`` is on ``time.monotonic()``. ``resumed``: the engine decodes in the room's memory,
    and says when it does no more.
    """

    key: RoomKey
    request: GenerationRequest
    generation: NodeGeneration
    enqueued: float
    placement: Placement | None = None
    link: PrefillLink | None = None
    room: DecodeRoom | None = None
    resumed: bool = False
    n_generated: int = 0
    skipped: frozenset[Check] = frozenset()
    retries_left: int = 1
    n_retries: int = 0
    avoids: tuple[PrefillLink, ...] = ()
    failed_before: Failure | None = None
    times: Times = field(init=False)

    def __post_init__(self) -> None:
        self.times = Times(self.enqueued)

    def may_be_retried(self, failure: Failure) -> bool:
        """Whether ``failure`` is not the request's own fault, and somebody still waits for the answer."""
        may_be = failure.kind.may_be_retried
        return may_be and self.retries_left > 0 and self.link is not None and not self.generation.ended

    def end(self, outcome: str, now: float) -> RequestEnd:
        """What is logged of the request. What failed attempts took counts as time in the queue."""
        times, room_s = self.times, self.room.phase_s if self.room is not None else {}
        opened, decoding, told = times.opened or now, times.decoding or now, times.at_prefill
        queue_s = opened - times.submitted
        if told is not None:  # it knows better than what was heard of it, and when
            queue_s, prefill_s = queue_s + told.queued_s, told.prefill_s
            transfer_s = max(0.0, decoding - opened - told.queued_s - told.prefill_s)
        elif self.room is not None:
            queue_s += sum(room_s.get(phase, 0.0) for phase in _QUEUED)
            prefill_s = room_s.get("prefill", 0.0)
            transfer_s = room_s.get("transfer", 0.0) + room_s.get("verify", 0.0)
        else:
            prefill_s, transfer_s = decoding - opened, 0.0
        return RequestEnd(
            request_id=self.request.request_id,
            room=None if self.room is None and self.request.routed is None else self.key.room,
            peer_role="prefill",
            peer=self.link.address if self.link is not None else "local" if times.opened else "none",
            n_prompt=len(self.request.prompt_ids),
            n_generated=self.n_generated,
            phase_s={
                "queue": queue_s,
                "prefill": prefill_s,
                "transfer": transfer_s,
                "decode": now - decoding,
            },
            outcome=outcome,
            n_retries=self.n_retries,
        )

    def next_attempt(self, key: RoomKey, failure: Failure) -> DecodeRequest:
        """The same request once more, after ``failure``: ``key`` has a new epoch, memory and prefill node are open."""
        again = replace(
            self,
            key=key,
            enqueued=time.monotonic(),
            placement=None,
            link=None,
            room=None,
            skipped=frozenset(),
            retries_left=self.retries_left - 1,
            n_retries=self.n_retries + 1,
            avoids=tuple(link for link in (*self.avoids, self.link) if link is not None),
            failed_before=failure,
        )
        again.times.submitted = self.times.submitted
        return again


class RoomOwner(Protocol):
    """What the node does when a room gets somewhere. Called in the event loop; must not block."""

    def room_committed(self, work: DecodeRequest, done: Done, first: TokenLogprob) -> None: ...

    def room_failed(self, work: DecodeRequest, failure: Failure) -> None: ...

    def room_broken(self, work: DecodeRequest, error: Exception) -> None: ...

    def room_free(self, work: DecodeRequest) -> None:
        """Nothing writes into the room's memory any more."""
        ...

    def request_arrived(self, key: RoomKey) -> bool:
        """The router's request for a room that waits here has come to the prefill node. False if no such room waits."""
        ...

    def room_refused(self, key: RoomKey, failure: Failure) -> bool:
        """The prefill node ended a room that has no memory here yet. False if there is no such room."""
        ...

    def peers_changed(self) -> None: ...
