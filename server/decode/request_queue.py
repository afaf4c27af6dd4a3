"""Requests that wait for a slot and pages, first come, first served; and how they end if they get none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from server.decode.peer_pool import PeerPool
from server.decode.request import DecodeRequest
from server.decode.routed_rooms import RoutedRooms
from server.failure import Failure, RequestFailed
from server.transfer.metrics import NodeMetrics
from server.transfer.rooms import Deadlines, RoomKey


class RequestQueue:
    """``forget`` is called for every request that ends here. Iteration is over a copy."""

    def __init__(
        self,
        metrics: NodeMetrics,
        forget: Callable[[DecodeRequest], None],
        deadlines: Deadlines,
        clock: Callable[[], float],
    ) -> None:
        self._reqs: deque[DecodeRequest] = deque()
        self._routed_rooms = RoutedRooms(deadlines.pair_s, clock)
        self._metrics = metrics
        self._forget = forget
        self._admission_s = deadlines.admission_s
        self._clock = clock
        self._moved = clock()

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._reqs))

    def __contains__(self, req: object) -> bool:
        return req in self._reqs

    def put(self, req: DecodeRequest) -> None:
        self._reqs.append(req)
        self.fail(self._routed_rooms.tick((req,)))

    def put_first(self, req: DecodeRequest) -> None:
        """For one that has waited before."""
        self._reqs.appendleft(req)

    def may_have_memory(self, req: DecodeRequest) -> bool:
        """False while it is not known that the prefill node has its half of a routed room."""
        return req.request.routed is None or self._routed_rooms.is_paired(req)

    def announce(self) -> None:
        """Announces routed rooms to their prefill nodes, and ends those that can come to nothing."""
        self.fail(self._routed_rooms.tick(self))

    def request_arrived(self, key: RoomKey) -> bool:
        """A prefill node has its half of the room; False if that does not wait here."""
        return self._routed_rooms.request_arrived(key)

    def take(self, req: DecodeRequest) -> None:
        """The request has memory: its room opens."""
        self._reqs.remove(req)
        self._routed_rooms.opened(req.key)
        self.is_moving()
        self._metrics.phase("admission", self._moved - req.enqueued_at)

    def is_moving(self) -> None:
        """Something here or in the engine went on: waiting is no silence."""
        self._moved = self._clock()

    def drop(self, req: DecodeRequest, reason: str) -> None:
        """The request ends before it had memory; its client is the caller's."""
        self._reqs.remove(req)
        self._routed_rooms.given_up(req, reason)
        self._forget(req)

    def fail(self, failures: Iterable[tuple[DecodeRequest, Failure]]) -> None:
        """Ends requests, each with its reason."""
        for req, failure in list(failures):
            req.generation.fail(RequestFailed(failure))
            self._metrics.room_ended("failed", failure.code)
            self.drop(req, failure.reason)

    def refuse(self, key: RoomKey, failure: Failure) -> bool:
        """Ends the request whose prefill node says so itself; False if it does not wait here."""
        for req in self:
            if req.key == key:
                self._routed_rooms.opened(key)
                self.fail([(req, failure)])
                return True
        return False

    def fail_hopeless(self, peers: PeerPool) -> None:
        """Ends what waits for a prefill node when there is none, and what was to be retried when there is no other."""
        if not peers.has_any():
            failure = Failure("no_prefill", peers.why_none())
            self.fail((req, failure) for req in self)
        self.fail(
            (req, req.failed_before) for req in self if req.failed_before is not None and peers.pick(req.avoids) is None
        )

    def tick(self) -> None:
        """Reminds prefill nodes of routed rooms, and ends what waits for too long while nothing moves."""
        self.announce()
        now = self._clock()
        reason = f"phase admission: no slot and pages became free for {self._admission_s:g} s (the deadline)"
        failure = Failure("overloaded", reason)
        self.fail((req, failure) for req in self if now - max(self._moved, req.enqueued_at) > self._admission_s)
