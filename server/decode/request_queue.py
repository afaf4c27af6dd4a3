"""Requests that wait for a slot and pages, in which order; and which of them have waited too long."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator

from server.decode.peer_pool import PeerPool
from server.decode.request import DecodeRequest
from server.failure import Failure
from server.transfer.rooms import RoomKey


class RequestQueue:
    """Iteration is over a copy, in the order of their coming. Seconds by ``clock``."""

    def __init__(self, admission_s: float, clock: Callable[[], float]) -> None:
        self._reqs: deque[DecodeRequest] = deque()
        self._admission_s = admission_s
        self._clock = clock
        self.moved_at = clock()
        """When something here or in the engine went on last."""

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._reqs))

    def __contains__(self, req: object) -> bool:
        return req in self._reqs

    def in_turn(self, under_way: Iterable[DecodeRequest]) -> Iterator[DecodeRequest]:
        """Those that wait, in the order in which they get memory: what is tried again first, then what has fewest of
        its own group before it, ``under_way`` or waiting, of equal ones what came first. So one HTTP request of many
        samples takes what is free, and then turns with the others.
        """
        if not any(req.request.group for req in self._reqs):
            yield from self
            return
        before: Counter[Hashable] = Counter(req.request.group for req in under_way)
        order: list[tuple[int, int, DecodeRequest]] = []
        for position, req in enumerate(self._reqs):
            group = req.request.group or req.key
            order.append((-1 if req.n_retries else before[group], position, req))
            before[group] += 1
        heapq.heapify(order)
        while order:
            yield heapq.heappop(order)[-1]

    def find(self, key: RoomKey) -> DecodeRequest | None:
        return next((req for req in self._reqs if req.key == key), None)

    def put(self, req: DecodeRequest) -> None:
        self._reqs.append(req)

    def put_first(self, req: DecodeRequest) -> None:
        """For one that has waited before."""
        self._reqs.appendleft(req)

    def remove(self, req: DecodeRequest) -> None:
        self._reqs.remove(req)

    def note_progress(self) -> None:
        """Something here or in the engine went on: waiting is not silence."""
        self.moved_at = self._clock()

    def without_peer(self, peers: PeerPool) -> list[tuple[DecodeRequest, Failure]]:
        """What waits for a prefill node when there is none, and what was to be retried when there is no other."""
        if not peers.has_any():
            failure = Failure("no_prefill", peers.why_none())
            return [(req, failure) for req in self._reqs]
        return [
            (req, req.failed_before)
            for req in self._reqs
            if req.failed_before is not None and peers.pick(req.avoids) is None
        ]

    def overdue(self) -> list[tuple[DecodeRequest, Failure]]:
        """What has waited for too long while nothing moved."""
        now = self._clock()
        reason = f"phase admission: no slot and pages became free for {self._admission_s:g} s (the deadline)"
        failure = Failure("overloaded", reason)
        return [(req, failure) for req in self._reqs if now - max(self.moved_at, req.enqueued_at) > self._admission_s]
