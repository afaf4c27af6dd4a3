"""The clock, the network and the weather of one simulated pair."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from server.transfer.protocol import AnyMessage, Ping, Pong
from server.transfer.rooms import Deadlines
from tests.simulation.decode import SimulatedDecode
from tests.simulation.memory import Write
from tests.simulation.prefill import SimulatedPrefill

TICK_S = 0.5
NETWORK_S = 0.01
LATEST_S = 60.0


@dataclass(frozen=True)
class Weather:
    """Probabilities of what goes wrong, each per occasion (a message, a batch, a chunk, a tick, a room)."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    late: float = 0.0
    """A message comes whenever it likes, also in a later registration, or to a later process."""
    refused: float = 0.0
    unknown: float = 0.0
    engine_fails: float = 0.0
    engine_hangs: float = 0.0
    abort: float = 0.0
    bad_digest: float = 0.0
    prefill_crash: float = 0.0
    decode_crash: float = 0.0
    connection_lost: float = 0.0
    half_lost: float = 0.0
    """The request of a room that a router named comes to one node only."""
    http_abort: float = 0.0
    again: float = 0.0
    """A router uses the id of a room once more."""


class World:
    """One prefill and one decode node, the messages between them, and the transport sessions of the decode node."""

    def __init__(self, seed: int, weather: Weather, *, n_rooms: int = 6, n_slots: int = 2) -> None:
        self.rng = random.Random(seed)
        self.weather = weather
        self.deadlines = Deadlines()
        self.now = 0.0
        self.calm = False
        self._sessions = itertools.count(1)
        self._open_sessions: set[int] = set()
        self.n_asked, self.n_committed = n_rooms, 0
        self.committed: set[int] = set()
        """Rooms whose state the decode node has proved."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._heartbeats: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.prefill = SimulatedPrefill(self, n_slots, seed)
        self.decode = SimulatedDecode(self, n_slots, seed)
        for room in range(1000, 1000 + n_rooms, 2):
            self.at(self.rng.uniform(0, 5), self.decode.ask)
            self.at(self.rng.uniform(0, 5), lambda room=room: self.route(room))  # type: ignore[misc]
            if self.hits(weather.again):
                self.at(self.rng.uniform(5, 30), lambda room=room: self.route(room))  # type: ignore[misc]

    def route(self, room: int) -> None:
        """A router sends one request to both nodes, which get it at about the same time."""
        if not self.hits(self.weather.half_lost):
            self.at(self.rng.uniform(0, 3), lambda: self.decode.ask(room))
        if not self.hits(self.weather.half_lost):
            self.at(self.rng.uniform(0, 3), lambda: self.prefill.ask(room))

    # --- time ---

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), what))

    def hits(self, probability: float) -> bool:
        return probability > 0 and not self.calm and self.rng.random() < probability

    def run(self, troubled_s: float = 40.0, longest_s: float = 600.0) -> None:
        """Bad weather, then calm until nothing is left to happen; raises :class:`AssertionError` for what is wrong."""
        tick_at = 0.0
        while self._events or not self._is_over():
            self.calm = self.calm or self.now >= troubled_s
            while (queue := self._next_queue()) and queue[0][0] <= tick_at:
                self.now, _, what = heapq.heappop(queue)
                what()
            self.now = tick_at
            self._tick()
            tick_at += TICK_S
            assert tick_at < longest_s, f"rooms that never end: {self.decode.left} on D, {self.prefill.left} on P"
        self.decode.check_over()
        self.prefill.check_over()

    def _next_queue(self) -> list[tuple[float, int, Callable[[], None]]]:
        """That with the earlier event; heartbeats go on for ever, and nobody waits for them."""
        queues = [queue for queue in (self._events, self._heartbeats) if queue]
        return min(queues, key=lambda queue: queue[0][:2], default=[])

    def _is_over(self) -> bool:
        return self.decode.is_over and self.prefill.is_over

    def _tick(self) -> None:
        self.decode.tick()
        self.prefill.tick()
        if self.hits(self.weather.prefill_crash):
            self.prefill.crash()
        if self.hits(self.weather.decode_crash):
            self._open_sessions.clear()
            self.decode.crash()
        if self.hits(self.weather.connection_lost):
            (self.decode.lose if self.rng.random() < 0.5 else self.prefill.lose_any)()

    # --- network ---

    def to_prefill(self, message: AnyMessage) -> None:
        self._post(lambda: self.prefill.deliver(message), isinstance(message, Ping))

    def to_decode(self, message: AnyMessage) -> None:
        self._post(lambda: self.decode.deliver(message), isinstance(message, Pong))

    def _post(self, deliver: Callable[[], None], is_heartbeat: bool) -> None:
        queue = self._heartbeats if is_heartbeat else self._events
        for _ in range(2 if self.hits(self.weather.duplicate) else 1):
            if not self.hits(self.weather.loss):
                heapq.heappush(queue, (self.now + self._delay_s(), next(self._order), deliver))

    def _delay_s(self) -> float:
        if self.hits(self.weather.late):
            return self.rng.uniform(0, LATEST_S)
        return self.rng.uniform(0, 8.0) if self.hits(self.weather.slow) else NETWORK_S

    # --- transport sessions ---

    def open_session(self) -> int:
        session = next(self._sessions)
        self._open_sessions.add(session)
        return session

    def close_session(self, session: int) -> None:
        self._open_sessions.discard(session)

    def land(self, write: Write) -> bool:
        """Bytes of a write reach D, unless its transport session is closed."""
        if write.session not in self._open_sessions:
            return False
        self.decode.memory.land(write)
        return True
