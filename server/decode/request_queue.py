"""Requests that wait for a slot and pages, first come, first served; and how they end if they get none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from server.decode.peer_pool import PeerPool
from server.decode.request import DecodeRequest
from server.decode.routed_rooms import RoutedRooms
from server.failure import Failure, RequestFailed
from server.transfer.metrics import NodeMetrics
from server.transfer.rooms import RoomKey


class RequestQueue:
    """``forget`` is called for every request that ends here. Iteration is over a copy.

    ``pair_s``: how long a room that a router named waits for its other half.
    """

    def __init__(self, metrics: NodeMetrics, forget: Callable[[DecodeRequest], None], pair_s: float) -> None:
        self._works: deque[DecodeRequest] = deque()
        self._rooms = RoutedRooms(pair_s)
        self._metrics = metrics
        self._forget = forget
        self._moved = time.monotonic()

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._works))

    def __contains__(self, work: object) -> bool:
        return work in self._works

    def put(self, work: DecodeRequest) -> None:
        self._works.append(work)
        self.fail(self._rooms.tick((work,)))

    def put_first(self, work: DecodeRequest) -> None:
        """For one that has waited before."""
        self._works.appendleft(work)

    def may_have_memory(self, work: DecodeRequest) -> bool:
        """False while it is not known that the prefill node has its half of a room that a router named."""
        return work.request.routed is None or self._rooms.is_paired(work)

    def tell(self) -> None:
        """Tells prefill nodes of the rooms that routers named, and ends those that can come to nothing."""
        self.fail(self._rooms.tick(self))

    def request_arrived(self, key: RoomKey) -> bool:
        """A prefill node has its half of the room; False if that does not wait here."""
        return self._rooms.request_arrived(key)

    def take(self, work: DecodeRequest) -> None:
        """The request has memory: its room opens."""
        self._works.remove(work)
        self._rooms.opened(work.key)
        self.is_moving()
        self._metrics.phase("admission", self._moved - work.enqueued)

    def is_moving(self) -> None:
        """Something here or in the engine went on: waiting is no silence."""
        self._moved = time.monotonic()

    def drop(self, work: DecodeRequest, reason: str) -> None:
        """The request ends before it had memory; its client is the caller's."""
        self._works.remove(work)
        self._rooms.given_up(work, reason)
        self._forget(work)

    def fail(self, failures: Iterable[tuple[DecodeRequest, Failure]]) -> None:
        """Ends requests, each with its reason."""
        for work, failure in list(failures):
            work.generation.fail(RequestFailed(failure))
            self._metrics.room_ended("failed", failure.code)
            self.drop(work, failure.reason)

    def refuse(self, key: RoomKey, failure: Failure) -> bool:
        """Ends the request whose prefill node says so itself; False if it does not wait here."""
        for work in self:
            if work.key == key:
                self._rooms.opened(key)
                self.fail([(work, failure)])
                return True
        return False

    def fail_hopeless(self, peers: PeerPool) -> None:
        """Ends what waits for a prefill node when there is none, and what was to be retried when there is no other."""
        if not peers.has_any():
            failure = Failure("no_prefill", peers.why_none())
            self.fail((work, failure) for work in self)
        self.fail(
            (work, work.failed_before)
            for work in self
            if work.failed_before is not None and peers.pick(work.avoids) is None
        )

    def tick(self, admission_s: float) -> None:
        """Tells prefill nodes what they must hear, and ends what waits for too long while nothing moves."""
        self.tell()
        now = time.monotonic()
        reason = f"phase admission: no slot and pages became free for {admission_s:g} s (the deadline)"
        failure = Failure("overloaded", reason)
        self.fail((work, failure) for work in self if now - max(self._moved, work.enqueued) > admission_s)
