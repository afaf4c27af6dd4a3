"""The simulated prefill node: the real room state machine, tombstones and allocator, driven as the node drives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from server.cache.layout import Placement
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest, RoutedRoom, TokenLogprob
from server.failure import Failure, RequestFailed
from server.prefill.registrations import Registrations, Standing
from server.prefill.request import read_request
from server.prefill.room import (
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
    PrefillPhase,
    PrefillRoom,
    Pushed,
    PushPages,
    PushTail,
    QueueMoved,
    Release,
    SenderGone,
    failed_message,
)
from server.prefill.routed_rooms import RoutedRooms
from server.transfer.plan import Rows
from server.transfer.protocol import (
    Abort,
    AnyMessage,
    Committed,
    Ping,
    Pong,
    Quiesced,
    Register,
    Registered,
    Registration,
    Rejected,
    Reserve,
    RoomMessage,
    RoutedRequest,
    Waiting,
    Writes,
    ids_of,
)
from server.transfer.rooms import Forget, GivenUp, PeerLost, RoomKey, Send, Tick, Tombstones
from tests.nodes.support import FakeTokenizer
from tests.simulation.memory import N_TOKENS, Write, allocator
from tests.transfer.support import make_manifest

if TYPE_CHECKING:
    from tests.simulation.world import World

LOST = Failure("peer_lost", "simulated")
N_CHUNKS = 3
ROUTING_ID = b"D"
MANIFEST = make_manifest("prefill")


@dataclass
class Peer:
    """A registration, and the transport session that its state is written to. Heard of last at ``heard``."""

    registration: Registration
    session: int
    heard: float
    send: Callable[[AnyMessage], None]


@dataclass
class Prompt:
    """One room. ``batches`` has the fate of every batch: ``flying``, ``applied``, ``refused`` or ``unknown``."""

    room: PrefillRoom
    registration: Registration
    session: int
    request: GenerationRequest
    first: TokenLogprob | None = None
    placement: Placement | None = None
    computing: bool = False
    batches: dict[int, str] = field(default_factory=dict)

    @property
    def key(self) -> RoomKey:
        return self.room.key


class SimulatedPrefill:
    """``life`` counts its processes: a crash forgets everything; bytes that it had sent may still arrive."""

    def __init__(self, world: World, n_slots: int, seed: int) -> None:
        self._world, self._n_slots, self._seed = world, n_slots, seed
        self.life = 0
        self.refused: list[RequestFailed] = []
        self._begin()

    @property
    def incarnation(self) -> str:
        return f"{1000 + self.life:032x}"

    def _begin(self) -> None:
        self.life += 1
        self._manifest = msgspec.structs.replace(MANIFEST, incarnation=self.incarnation)
        self._registrations = Registrations(self.incarnation)
        self._peers: dict[str, Peer] = {}
        self._allocator = allocator(self._n_slots, self._seed + 1)
        self._prompts: dict[RoomKey, Prompt] = {}
        self._queue: deque[Prompt] = deque()
        self._stones = Tombstones()
        self._clients: dict[int, NodeGeneration] = {}
        self._pairing = RoutedRooms(
            self._feed,  # type: ignore[arg-type]
            self._stones,
            FakeTokenizer(),
            self._world.deadlines.pair_s,
            clock=lambda: self._world.now,
        )

    def crash(self) -> None:
        self._begin()

    @property
    def left(self) -> list[RoomKey]:
        return list(self._prompts)

    @property
    def is_over(self) -> bool:
        return not self._prompts and not self._pairing.n_http

    def check_over(self) -> None:
        for room, client in self._clients.items():
            assert client.ended, f"the client of room {room} was told nothing"
            if client._route is not None:
                assert room in self._world.committed, f"room {room} was answered and not committed"
        assert self._allocator.counts()["slots"]["free"] == self._n_slots, "a slot leaked on the prefill node"

    def tick(self) -> None:
        for peer in list(self._peers.values()):
            if self._world.now - peer.heard > self._world.deadlines.peer_s:
                self._lose(peer)
        for prompt in list(self._prompts.values()):
            self._feed(prompt, Tick())
        self._pairing.tick()
        for client in self._clients.values():
            if self._world.hits(self._world.weather.http_abort):
                client.abort()

    def ask(self, room: int) -> None:
        """A client comes over HTTP, with a room that a router named."""
        request = GenerationRequest(f"h{room}", tuple(range(N_TOKENS)), routed=RoutedRoom(room))
        try:
            self._clients[room] = self._pairing.submit(request)
        except RequestFailed as failure:
            self.refused.append(failure)

    # --- the peer ---

    def _on_register(self, message: Register) -> None:
        theirs, number = message.manifest, message.registration
        standing = self._registrations.judge(theirs.incarnation, number, ROUTING_ID)
        if standing is Standing.OVER:
            self._world.to_decode(Pong(self.incarnation, number, registered=False))
            return
        if standing is Standing.NEW:
            valid = self._world.decode.registration
            before = self._peers.get(theirs.incarnation)
            if before is not None:
                is_valid = before.registration == valid
                assert not is_valid, f"registration {valid} was ended by one with number {number}"
                self._lose(before)
            registration = self._registrations.begin(theirs.incarnation, number, ROUTING_ID)
            self._peers[theirs.incarnation] = Peer(
                registration, int(theirs.session), self._world.now, self._world.to_decode
            )
        self._world.to_decode(Registered(number, self._manifest))

    def lose_any(self) -> None:
        """This side alone counts its peers as lost."""
        for peer in list(self._peers.values()):
            self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        """The rooms of this registration are over, their sender closes in a while."""
        self._registrations.end(peer.registration)
        del self._peers[peer.registration.decode]
        for prompt in list(self._prompts.values()):
            if prompt.registration == peer.registration:
                self._feed(prompt, PeerLost(LOST))
                self._later(self._world.rng.uniform(0.0, 5.0), prompt, self._close_sender)
        self._stones.drop_peer(peer.registration.decode)
        self._pairing.on_lost(peer)  # type: ignore[arg-type]

    def _close_sender(self, prompt: Prompt) -> None:
        for batch_id, fate in prompt.batches.items():
            if fate == "flying":
                prompt.batches[batch_id] = "unknown"
        self._feed(prompt, SenderGone())

    def deliver(self, message: AnyMessage) -> None:
        if isinstance(message, Register):
            self._on_register(message)
        elif isinstance(message, Ping):
            meant = Registration(self.incarnation, message.decode, message.registration)
            is_known = self._registrations.is_current(meant, ROUTING_ID)
            if is_known:
                self._peers[message.decode].heard = self._world.now
            self._world.to_decode(Pong(self.incarnation, message.registration, is_known))
        elif isinstance(message, RoomMessage) and self._registrations.covers(message, ROUTING_ID):
            peer = self._peers[message.decode]
            peer.heard = self._world.now
            self._on_room_message(peer, message)

    def _on_room_message(self, peer: Peer, message: RoomMessage) -> None:
        assert isinstance(message, Waiting | Reserve | Abort | Committed | Rejected)
        key = RoomKey(message.room, message.epoch, message.decode)
        if isinstance(message, Waiting):
            self._on_waiting(peer, key, message)
        elif key in self._prompts:
            self._feed(self._prompts[key], message)
        elif isinstance(message, Reserve):
            self._on_reserve(peer, key, message)
        elif isinstance(message, Abort):
            failure = Failure("aborted", message.reason)
            self._pairing.given_up(key, failure)
            if self._stones.clean(key):
                self._stones.bury(key, failure, clean=True)
                self._world.to_decode(Quiesced(**ids_of(message)))
            else:
                self._world.to_decode(failed_message(message, failure, Writes.UNKNOWN))

    def _on_waiting(self, peer: Peer, key: RoomKey, waiting: Waiting) -> None:
        if key in self._prompts:
            return
        stone = self._stones.refuses(key)
        if stone is not None:
            failure = stone.failure or Failure("room_over", "over")
            self._world.to_decode(failed_message(waiting, failure, Writes.SETTLING))
        else:
            self._pairing.on_waiting(peer, waiting)  # type: ignore[arg-type]

    def _on_reserve(self, peer: Peer, key: RoomKey, reserve: Reserve) -> None:
        if (stone := self._stones.refuses(key)) is not None:
            failure = stone.failure or Failure("room_over", "over")
            writes = Writes.SETTLING if self._stones.clean(key) else Writes.UNKNOWN
            self._world.to_decode(failed_message(reserve, failure, writes))
            return
        is_twice = any(
            other.room.active
            for known, other in self._prompts.items()
            if (known.room, known.decode) == (key.room, key.decode)
        )
        room = PrefillRoom(reserve, N_TOKENS, self._world.deadlines, self._world.now)
        prompt = Prompt(room, peer.registration, peer.session, read_request(reserve))
        self._prompts[key] = prompt
        twice = Failure("duplicate_room", "simulated")
        self._feed(prompt, GivenUp(twice) if is_twice else reserve)
        if isinstance(reserve.request, RoutedRequest):
            failure = self._pairing.join(prompt)  # type: ignore[arg-type]
            if failure is not None:
                self._feed(prompt, GivenUp(failure))
        if room.active:
            self._queue.append(prompt)
            self._admit()

    # --- the engine ---

    def _admit(self) -> None:
        while self._queue:
            prompt = self._queue[0]
            if prompt.room.phase is not PrefillPhase.QUEUED:
                self._queue.popleft()
                continue
            prompt.placement = self._allocator.reserve(prompt.room.key, N_TOKENS)
            if prompt.placement is None:
                return
            self._queue.popleft()
            prompt.computing = True
            self._feed(prompt, Admitted())
            if not self._world.hits(self._world.weather.engine_hangs):
                self._compute_later(prompt, 1)
            for other in self._queue:
                self._feed(other, QueueMoved())

    def _compute_later(self, prompt: Prompt, chunk: int) -> None:
        self._later(self._world.rng.uniform(0.01, 2.0), prompt, lambda prompt: self._compute(prompt, chunk))

    def _compute(self, prompt: Prompt, chunk: int) -> None:
        if not prompt.computing:
            return
        if self._world.hits(self._world.weather.engine_fails):
            prompt.computing = False
            self._feed(prompt, EngineIdle(Failure("engine_error", "simulated")))
        elif chunk < N_CHUNKS:
            self._feed(prompt, Advanced(chunk))
            self._compute_later(prompt, chunk + 1)
        else:
            prompt.computing = False
            prompt.first = TokenLogprob(1, -0.5)
            self._feed(prompt, Computed({"swa": 1}, 1.0, 0.0))

    def _stop_computing(self, prompt: Prompt) -> None:
        if prompt.computing:
            prompt.computing = False
            self._feed(prompt, EngineIdle())

    # --- rooms ---

    def _later(self, delay_s: float, prompt: Prompt, what: Callable[[Prompt], None]) -> None:
        """``what`` for the prompt, if its room is still known then."""
        self._world.at(delay_s, lambda: what(prompt) if self._prompts.get(prompt.room.key) is prompt else None)

    def _feed(self, prompt: Prompt, event: PrefillEvent) -> None:
        if self._prompts.get(prompt.room.key) is prompt:
            for action in prompt.room.handle(event, self._world.now):
                self._perform(prompt, action)
            self._pairing.moved(prompt)  # type: ignore[arg-type]

    def _perform(self, prompt: Prompt, action: PrefillAction) -> None:
        world, key = self._world, prompt.room.key
        match action:
            case Send():
                world.to_decode(action.message)
            case PushPages() | PushTail():
                self._push(prompt, last=isinstance(action, PushTail))
            case CancelEngine():
                self._later(world.rng.uniform(0, 1.0), prompt, self._stop_computing)
            case CancelPush():
                pass  # what is in flight ends by itself
            case Clean():
                assert prompt.placement is not None
                self._later(world.rng.uniform(0, 0.5), prompt, lambda prompt: self._feed(prompt, Cleaned()))
            case Release():
                self._allocator.release(key)
                prompt.placement = None
                self._admit()
            case Forget():
                assert prompt.placement is None, f"{key} was forgotten with its memory"
                if self._registrations.is_current(prompt.registration, ROUTING_ID):
                    self._stones.bury(key, prompt.room.failure, clean=action.clean)
                del self._prompts[key]

    # --- the sender ---

    def _push(self, prompt: Prompt, *, last: bool) -> None:
        world, reserve = self._world, prompt.room.reserve
        assert prompt.placement is not None, f"{prompt.room.key} pushes without memory"
        batch_id = len(prompt.batches) + 1
        prompt.batches[batch_id] = "flying"
        self._feed(prompt, Pushed(batch_id, (Rows("swa", batch_id - 1, batch_id, 4),), 1, last))
        target = Placement(reserve.slot, reserve.pages)
        write = Write(prompt.room.key, prompt.session, prompt.placement, target, batch_id)
        flight_s = world.rng.uniform(0, 4.0)
        if world.hits(world.weather.refused):
            self._later(flight_s, prompt, lambda prompt: self._end_batch(prompt, batch_id, "refused"))
        elif world.hits(world.weather.unknown):
            self._later(flight_s, prompt, lambda prompt: self._end_batch(prompt, batch_id, "unknown"))
            world.at(world.rng.uniform(0, 60.0), lambda: world.land(write))  # and still lands, perhaps much later
        else:
            world.at(flight_s, lambda: self._apply(prompt, write))

    def _apply(self, prompt: Prompt, write: Write) -> None:
        """The bytes are read here and land there, in one moment; the sender learns of it a little later."""
        is_alive = self._prompts.get(write.key) is prompt
        if is_alive and prompt.batches[write.batch_id] == "flying":
            assert prompt.placement == write.source, f"{write.key} sends memory that it does not hold any more"
        fate = "applied" if self._world.land(write) else "unknown"
        self._later(
            self._world.rng.uniform(0, 0.2), prompt, lambda prompt: self._end_batch(prompt, write.batch_id, fate)
        )

    def _end_batch(self, prompt: Prompt, batch_id: int, fate: str) -> None:
        if prompt.batches[batch_id] != "flying":
            return
        prompt.batches[batch_id] = fate
        is_quiet = all(known in ("applied", "refused") for known in prompt.batches.values())
        failure = None if fate == "applied" else Failure("transfer_failed", fate, "swa")
        self._feed(prompt, BatchEnded(batch_id, failure, is_quiet))
