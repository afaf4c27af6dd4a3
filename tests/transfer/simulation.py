"""Both room state machines under a virtual clock, with a network, an engine and a sender that do their worst, by seed.

Nothing here is real but the state machines and the tombstones. The checks are at the place where the fault would show:
memory that is freed while a write may still land, a client that is told twice, a room that never ends.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from server.transfer.decode_room import (
    Commit,
    DecodeAction,
    DecodeEvent,
    DecodeRoom,
    FailClient,
    Fenced,
    FencePeer,
    Free,
    Opened,
    Verified,
    Verify,
)
from server.transfer.plan import Rows
from server.transfer.prefill_events import (
    Admitted,
    Advanced,
    BatchEnded,
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
    QueueMoved,
    Release,
)
from server.transfer.prefill_room import PrefillPhase, PrefillRoom, failed_message
from server.transfer.protocol import (
    Abort,
    AnyMessage,
    Committed,
    Done,
    Quiesced,
    Rejected,
    Reserve,
    RoomMessage,
    RoomRequest,
    Sampling,
    Writes,
    ids_of,
    pack_tokens,
)
from server.transfer.rooms import Deadlines, Failure, Forget, GivenUp, PeerLost, RoomKey, Send, Tick, Tombstones

PREFILL, DECODE = "a" * 32, "b" * 32
LOST = Failure("peer_lost", "simulated", 502)
SAMPLING = Sampling(1, 0, 0.0, 1.0, 0, 1, (), (), False, None)


@dataclass
class Weather:
    """Probabilities of what goes wrong, each per occasion."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    refused: float = 0.0
    unknown: float = 0.0
    engine_fails: float = 0.0
    engine_hangs: float = 0.0
    abort: float = 0.0
    bad_digest: float = 0.0
    peer_lost: float = 0.0


@dataclass
class DecodeSide:
    room: DecodeRoom
    told: int = 0
    committed: bool = False
    freed: bool = False


@dataclass
class PrefillSide:
    room: PrefillRoom
    engine: str = "idle"
    memory: bool = False
    batches: dict[int, str] = field(default_factory=dict)
    """Fate of each batch: ``flying``, ``applied``, ``refused`` or ``unknown`` (may land at any time)."""


class Simulation:
    def __init__(self, seed: int, weather: Weather, n_rooms: int = 6, n_slots: int = 2) -> None:
        self.rng = random.Random(seed)
        self.weather = weather
        self.deadlines = Deadlines()
        self.now = 0.0
        self.session = 0
        self.calm = False
        self.d: dict[RoomKey, DecodeSide] = {}
        self.p: dict[RoomKey, PrefillSide] = {}
        self.queue: list[RoomKey] = []
        self.free_slots = n_slots
        self.n_slots = n_slots
        self.stones = Tombstones()
        self.old_fates: dict[RoomKey, dict[int, str]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for i in range(n_rooms):
            self.at(self.rng.uniform(0, 5), lambda i=i: self.open(i))

    # --- time ---

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), what))

    def hits(self, probability: float) -> bool:
        return not self.calm and self.rng.random() < probability

    def run(self, troubled_s: float = 60.0, calm_s: float = 400.0) -> None:
        """Bad weather, then calm until every deadline has passed; then everything must be over."""
        self.at(troubled_s, lambda: setattr(self, "calm", True))
        tick_at = 0.0
        while tick_at < troubled_s + calm_s:
            while self._events and self._events[0][0] <= tick_at:
                self.now, _, what = heapq.heappop(self._events)
                what()
            self.now = tick_at
            self.tick()
            tick_at += 0.5
        for key, side in self.d.items():
            assert side.told == 1, f"{key}: the client was told {side.told} times"
            assert side.committed or side.freed, f"{key} never ended: {side.room.phase}"
        assert not self.p, f"the prefill node still holds {self.p}"
        assert self.free_slots == self.n_slots, "a slot leaked"

    def tick(self) -> None:
        for key, side in list(self.d.items()):
            if side.room.active and self.hits(self.weather.abort):
                self.feed_d(key, GivenUp(Failure("aborted", "simulated", 499)))
            self.feed_d(key, Tick())
        for key in list(self.p):
            self.feed_p(key, Tick())
        if self.hits(self.weather.peer_lost):
            self.lose_peer()

    # --- network ---

    def post(self, deliver: Callable[[AnyMessage], None], message: AnyMessage) -> None:
        session = self.session
        for _ in range(2 if self.hits(self.weather.duplicate) else 1):
            if not self.hits(self.weather.loss):
                delay_s = self.rng.uniform(0, 8.0) if self.hits(self.weather.slow) else 0.01
                self.at(delay_s, lambda: deliver(message) if session == self.session else None)

    # --- decode side ---

    def open(self, i: int) -> None:
        request = RoomRequest(f"r{i}", pack_tokens([1, 2, 3]), SAMPLING)
        reserve = Reserve(PREFILL, DECODE, 100 + i % 4, i + 1, 1, (1,), ("swa",), request, 30.0)
        room = DecodeRoom(reserve, self.deadlines, self.now)
        self.d[room.key] = DecodeSide(room)
        self.feed_d(room.key, Opened())

    def deliver_to_d(self, message: AnyMessage) -> None:
        assert isinstance(message, RoomMessage)
        key = RoomKey(message.room, message.epoch, message.decode)
        assert not isinstance(message, Reserve | Abort | Committed | Rejected)
        if self.d[key].committed:
            if isinstance(message, Done):
                self.post(self.deliver_to_p, Committed(**ids_of(message)))
            return
        self.feed_d(key, message)  # type: ignore[arg-type]

    def feed_d(self, key: RoomKey, event: DecodeEvent) -> None:
        for action in self.d[key].room.handle(event, self.now):
            self.perform_d(key, self.d[key], action)

    def perform_d(self, key: RoomKey, side: DecodeSide, action: DecodeAction) -> None:
        match action:
            case Send():
                self.post(self.deliver_to_p, action.message)
            case Verify():
                bad = (
                    Failure("component_mismatch", "simulated", 502, "swa")
                    if self.hits(self.weather.bad_digest)
                    else None
                )
                self.at(self.rng.uniform(0, 3.0), lambda: self.feed_d(key, Verified(bad)))
            case Commit():
                side.told += 1
                side.committed = True
            case FailClient():
                side.told += 1
            case Free():
                assert not side.freed, f"{key} was freed twice"
                assert not side.committed, f"{key} was freed after its commit"
                side.freed = True
                flying = [fate for fate in self.fates(key) if fate in ("flying", "unknown")]
                assert not flying, f"{key} was freed while a write may still land"
            case FencePeer():
                self.lose_peer()
            case Forget():
                pass

    # --- prefill side, as the node does it ---

    def fates(self, key: RoomKey) -> list[str]:
        """What became of every write of a room, also of one that is forgotten."""
        return list(self.p[key].batches.values() if key in self.p else self.old_fates.get(key, {}).values())

    def deliver_to_p(self, message: AnyMessage) -> None:
        assert isinstance(message, Reserve | Abort | Committed | Rejected)
        key = RoomKey(message.room, message.epoch, message.decode)
        if key in self.p:
            self.feed_p(key, message)
        elif isinstance(message, Reserve):
            self.on_reserve(key, message)
        elif isinstance(message, Abort):
            failure = Failure("aborted", message.reason, 499)
            if self.stones.clean(key):
                self.stones.bury(key, failure, clean=True)
                self.post(self.deliver_to_d, Quiesced(**ids_of(message)))
            else:
                self.post(self.deliver_to_d, failed_message(message, failure, Writes.UNKNOWN))

    def on_reserve(self, key: RoomKey, reserve: Reserve) -> None:
        if (stone := self.stones.refuses(key)) is not None:
            failure = stone.failure or Failure("room_over", "over", 409)
            writes = Writes.SETTLING if self.stones.clean(key) else Writes.UNKNOWN
            self.post(self.deliver_to_d, failed_message(reserve, failure, writes))
            return
        duplicate = any(other.room == key.room for other in self.p)
        self.p[key] = PrefillSide(PrefillRoom(reserve, 3, self.deadlines, self.now))
        if duplicate:
            self.feed_p(key, GivenUp(Failure("duplicate_room", "simulated", 409)))
            return
        self.feed_p(key, reserve)
        self.queue.append(key)
        self.admit()

    def admit(self) -> None:
        while self.queue and self.free_slots:
            key = self.queue.pop(0)
            side = self.p.get(key)
            if side is None or side.room.phase is not PrefillPhase.QUEUED:
                continue
            self.free_slots -= 1
            side.memory, side.engine = True, "busy"
            self.feed_p(key, Admitted())
            if not self.hits(self.weather.engine_hangs):
                self.at(self.rng.uniform(0.01, 2.0), lambda key=key: self.compute(key, 1))
            for other in self.queue:
                self.feed_p(other, QueueMoved())

    def compute(self, key: RoomKey, chunk: int) -> None:
        side = self.p.get(key)
        if side is None or side.engine != "busy":
            return
        if self.hits(self.weather.engine_fails):
            side.engine = "idle"
            self.feed_p(key, EngineIdle(Failure("engine_error", "simulated", 500)))
        elif chunk < 3:
            self.feed_p(key, Advanced(chunk))
            self.at(self.rng.uniform(0.01, 2.0), lambda: self.compute(key, chunk + 1))
        else:
            side.engine = "idle"
            self.feed_p(key, Computed({"swa": 1}, 1.0, 0.0))

    def feed_p(self, key: RoomKey, event: PrefillEvent) -> None:
        side = self.p.get(key)
        if side is not None:
            for action in side.room.handle(event, self.now):
                self.perform_p(key, side, action)

    def perform_p(self, key: RoomKey, side: PrefillSide, action: PrefillAction) -> None:
        match action:
            case Send():
                self.post(self.deliver_to_d, action.message)
            case PushPages() | PushTail():
                self.push(key, side, last=isinstance(action, PushTail))
            case CancelEngine():
                self.at(self.rng.uniform(0, 1.0), lambda: self.cancel_engine(key))
            case CancelPush():
                pass  # pieces in flight end by themselves
            case Clean():
                assert side.memory
                self.at(self.rng.uniform(0, 0.5), lambda: self.feed_p(key, Cleaned()))
            case Release():
                assert side.memory, f"{key} gave back memory that it does not hold"
                side.memory = False
                self.free_slots += 1
                self.admit()
            case Forget():
                assert not side.memory
                self.stones.bury(key, side.room.failure, clean=action.clean)
                self.old_fates[key] = side.batches
                del self.p[key]

    def cancel_engine(self, key: RoomKey) -> None:
        side = self.p.get(key)
        if side is not None and side.engine == "busy":
            side.engine = "idle"
            self.feed_p(key, EngineIdle())

    def push(self, key: RoomKey, side: PrefillSide, *, last: bool) -> None:
        assert not self.d[key].freed, f"{key} pushes into memory that was freed"
        assert side.memory
        batch_id = len(side.batches) + 1
        side.batches[batch_id] = "flying"
        self.feed_p(key, Pushed(batch_id, (Rows("swa", batch_id - 1, batch_id, 4),), 1, last))
        fate = (
            "refused"
            if self.hits(self.weather.refused)
            else "unknown"
            if self.hits(self.weather.unknown)
            else "applied"
        )
        self.at(self.rng.uniform(0, 4.0), lambda: self.end_batch(key, side, batch_id, fate))

    def end_batch(self, key: RoomKey, side: PrefillSide, batch_id: int, fate: str) -> None:
        if self.p.get(key) is not side or side.batches.get(batch_id) != "flying":
            return
        assert not self.d[key].freed or fate == "refused", f"a write landed in freed memory of {key}"
        side.batches[batch_id] = fate
        quiesced = all(known in ("applied", "refused") for known in side.batches.values())
        failure = None if fate == "applied" else Failure("transfer_failed", fate, 502, "swa")
        self.feed_p(key, BatchEnded(batch_id, failure, quiesced))

    # --- a lost peer: what was under way is gone, a fence follows, the next session starts clean ---

    def lose_peer(self) -> None:
        self.session += 1
        for key in list(self.d):
            self.feed_d(key, PeerLost(LOST))
        self.p.clear()  # the prefill node restarted: its slots are new too
        self.queue.clear()
        self.free_slots = self.n_slots
        self.stones = Tombstones()
        self.old_fates.clear()
        for key in list(self.d):
            self.feed_d(key, Fenced())
