"""The simulated decode node: the real room state machine and allocator, driven as the node drives them."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from server.cache.handoff import prompt_hash
from server.cache.layout import Placement
from server.decode.request import Announced
from server.decode.room import (
    Commit,
    DecodeAction,
    DecodeEvent,
    DecodePhase,
    DecodeRoom,
    FailClient,
    Fenced,
    FencePeer,
    Free,
    Opened,
    Verified,
    Verify,
)
from server.decode.routed_rooms import announce, has_arrived, withdraw
from server.engine.request import GenerationRequest, RoutedRoom, TokenLogprob
from server.failure import Failure
from server.transfer.protocol import (
    Abort,
    AnyMessage,
    Committed,
    Done,
    Ping,
    Pong,
    Progress,
    Register,
    Registered,
    Registration,
    Rejected,
    RequestArrived,
    Reserve,
    RoomMessage,
    RoomRequest,
    RoutedRequest,
    Sampling,
    ids_of,
    pack_tokens,
    registration_of,
    room_ids,
)
from server.transfer.protocol import Failed as FailedMessage
from server.transfer.rooms import Forget, GivenUp, PeerLost, RoomKey, Send, Tick
from tests.simulation.memory import N_TOKENS, Memory
from tests.transfer.support import make_manifest

if TYPE_CHECKING:
    from tests.simulation.world import World

MANIFEST = make_manifest("decode")
LOST = Failure("peer_lost", "simulated")
ABORTED = Failure("aborted", "simulated")
SAMPLING = Sampling(1, 0, 0.0, 1.0, 0, 1, (), (), False, None)
PROMPT = tuple(range(N_TOKENS))


@dataclass(eq=False)
class Client:
    """One request: ``told`` counts the answers to its client, of which there must be one. ``room`` None: it waits."""

    key: RoomKey
    request: GenerationRequest
    link: SimulatedDecode
    announced: Announced | None = None
    room: DecodeRoom | None = None
    session: int = 0
    placement: Placement | None = None
    told: int = 0
    decoding: bool = False

    @property
    def is_routed(self) -> bool:
        return self.request.routed is not None


class SimulatedDecode:
    """``life`` counts its processes: a crash forgets everything, and the clients of the dead process with it.

    It is its own link to the prefill node: registers again and again with the real messages, pings, and gives a
    registration up that is over or silent.
    """

    address = "simulated:1"
    reason = "simulated"

    def __init__(self, world: World, n_slots: int, seed: int) -> None:
        self._world, self._n_slots, self._seed = world, n_slots, seed
        self._epochs = itertools.count(1)
        self.life = 0
        self.failures: list[Failure] = []
        self._begin()

    def _begin(self) -> None:
        self.life += 1
        self.memory = Memory(self._n_slots, self._seed)
        self._clients: dict[RoomKey, Client] = {}
        self._waiting: deque[Client] = deque()
        self._over: list[Client] = []
        self._number = 0
        self._session = 0
        self._prefill: str | None = None
        self._heard = self._pinged = self._back_by = 0.0
        self._register()

    def crash(self) -> None:
        self._begin()

    @property
    def left(self) -> list[RoomKey]:
        return list(self._clients)

    @property
    def is_over(self) -> bool:
        return not self._clients

    def check_over(self) -> None:
        for client in self._over:
            assert client.told == 1, f"{client.key}: the client was told {client.told} times"
        assert self.memory.all_free, "a slot or page leaked on the decode node"

    # --- the link ---

    @property
    def incarnation(self) -> str:
        return f"{self.life:032x}"

    @property
    def registration(self) -> Registration | None:
        return Registration(self._prefill, self.incarnation, self._number) if self._prefill is not None else None

    @property
    def coming_back(self) -> bool:
        return self._world.now < self._back_by

    def send(self, message: AnyMessage) -> None:
        self._world.to_prefill(message)

    def _register(self) -> None:
        self._number += 1
        self._session = self._world.open_session()
        self._back_by = self._world.now + self._world.deadlines.connect_s
        self._say_register()

    def _say_register(self) -> None:
        manifest = msgspec.structs.replace(MANIFEST, incarnation=self.incarnation, session=str(self._session))
        self.send(Register(self._number, manifest))

    def _tick_link(self) -> None:
        if self._prefill is not None and self._world.now - self._heard > self._world.deadlines.peer_s:
            self.lose()
        elif self._prefill is not None:
            if self._world.now - self._pinged >= self._world.deadlines.ping_s:
                self._pinged = self._world.now
                self.send(Ping(self.incarnation, self._number))
        elif self._session:
            self._say_register()

    def lose(self) -> None:
        """The registration is over. Its transport session is fenced after a while, then there is another one."""
        world, session, life = self._world, self._session, self.life
        if not session:
            return
        self._prefill, self._session = None, 0
        self._back_by = world.now + world.deadlines.connect_s
        for client in self._of(session):
            self._feed(client, PeerLost(LOST))

        def fenced() -> None:
            world.close_session(session)
            if life == self.life:
                for client in self._of(session):
                    self._feed(client, Fenced())
                world.at(world.rng.uniform(0.0, 1.0), lambda: self._register() if life == self.life else None)

        world.at(world.rng.uniform(0.0, 2.0), fenced)

    def _on_registered(self, message: Registered) -> None:
        if message.registration != self._number or not self._session:
            return
        if self._prefill is None:
            self._prefill, self._heard = message.manifest.incarnation, self._world.now
            self._tell_waiting()
            self._admit()
        elif self._prefill != message.manifest.incarnation:
            self.lose()

    def _on_pong(self, message: Pong) -> None:
        if message.registration != self._number:
            return
        if (self._prefill is not None and message.prefill != self._prefill) or not message.registered:
            self.lose()
        else:
            self._heard = self._world.now

    # --- requests ---

    def ask(self, named: int | None = None) -> None:
        """A client comes, with the room that a router ``named`` or one of this node's own.

        The ids of rooms come again, as soon as the node is finished with them.
        """
        used = {key.room for key in self._clients}
        if named in used:
            return
        room = next(room for room in range(100, 200) if room not in used) if named is None else named
        request = GenerationRequest(f"r{room}", PROMPT, routed=RoutedRoom(room) if named is not None else None)
        client = Client(RoomKey(room, next(self._epochs), self.incarnation), request, self)
        self._clients[client.key] = client
        self._waiting.append(client)
        self._tell_waiting()
        self._admit()

    def _admit(self) -> None:
        for client in list(self._waiting):
            if self._prefill is None or (client.is_routed and not has_arrived(client)):  # type: ignore[arg-type]
                continue
            placement = self.memory.reserve(client.key, self._session)
            if placement is None:
                return
            self._waiting.remove(client)
            client.announced = None
            self._open(client, placement)

    def _open(self, client: Client, placement: Placement) -> None:
        key, registration = client.key, self.registration
        assert registration is not None
        request: RoomRequest | RoutedRequest = RoomRequest(f"r{key.epoch}", pack_tokens(PROMPT), SAMPLING)
        if client.is_routed:
            request = RoutedRequest(f"r{key.epoch}", N_TOKENS, prompt_hash(PROMPT), SAMPLING)
        reserve = Reserve(
            **room_ids(registration, key.room, key.epoch),
            slot=placement.slot,
            pages=placement.pages,
            components=("swa",),
            request=request,
            silence_s=30.0,
        )
        client.room, client.session, client.placement = (
            DecodeRoom(reserve, self._world.deadlines, self._world.now),
            self._session,
            placement,
        )
        self._feed(client, Opened())

    def tick(self) -> None:
        self._tick_link()
        self._tell_waiting()
        for client in list(self._clients.values()):
            if self._world.hits(self._world.weather.abort):
                self._abort(client)
            self._feed(client, Tick())
        self._admit()

    def _tell_waiting(self) -> None:
        pair_s, now = self._world.deadlines.pair_s, self._world.now
        for client in [client for client in self._waiting if announce(client, pair_s, now) is not None]:  # type: ignore[arg-type]
            self._end_waiting(client, "simulated")

    def _end_waiting(self, client: Client, reason: str | None) -> None:
        """``reason`` None: the prefill node has said so itself."""
        self._waiting.remove(client)
        if reason is not None:
            withdraw(client, reason)  # type: ignore[arg-type]
        client.announced = None
        client.told += 1
        self._end(client)

    def _abort(self, client: Client) -> None:
        if client.room is None:
            self._end_waiting(client, "simulated")
        elif client.room.active:
            self._feed(client, GivenUp(ABORTED))

    def _of(self, session: int) -> list[Client]:
        return [client for client in self._clients.values() if client.session == session]

    def deliver(self, message: AnyMessage) -> None:
        if isinstance(message, Registered):
            self._on_registered(message)
        elif isinstance(message, Pong):
            self._on_pong(message)
        elif isinstance(message, RoomMessage) and registration_of(message) == self.registration:
            self._heard = self._world.now
            self._on_room_message(message)

    def _on_room_message(self, message: RoomMessage) -> None:
        assert not isinstance(message, Reserve | Abort | Committed | Rejected)
        client = self._clients.get(RoomKey(message.room, message.epoch, message.decode))
        if isinstance(message, RequestArrived):
            if client is None:
                self.send(Abort(**ids_of(message), reason="unknown room"))
            elif client.room is None and client.announced is not None:
                client.announced.has_arrived = True
                self._admit()
        elif client is not None and client.room is None and isinstance(message, FailedMessage):
            self._end_waiting(client, None)
        elif client is not None and not client.decoding:
            self._feed(client, message)  # type: ignore[arg-type]
        elif isinstance(message, Done) and self._was_committed(message):
            self.send(Committed(**ids_of(message)))
        elif client is None and isinstance(message, Progress | Done | FailedMessage):
            self.send(Abort(**ids_of(message), reason="unknown room"))

    def _was_committed(self, done: Done) -> bool:
        key = RoomKey(done.room, done.epoch, done.decode)
        rooms = [client.room for client in [*self._clients.values(), *self._over] if client.key == key]
        return any(room is not None and room.phase is DecodePhase.COMMITTED for room in rooms)

    # --- rooms ---

    def _feed(self, client: Client, event: DecodeEvent) -> None:
        if client.room is not None:
            for action in client.room.handle(event, self._world.now):
                self._perform(client, action)

    def _perform(self, client: Client, action: DecodeAction) -> None:
        world = self._world
        match action:
            case Send():
                world.to_prefill(action.message)
            case Verify():
                bad = Failure("component_mismatch", "simulated", "swa")
                verified = Verified(bad if world.hits(world.weather.bad_digest) else TokenLogprob(1, 0.0))
                life = self.life
                world.at(
                    world.rng.uniform(0, 3.0), lambda: self._verified(client, verified) if life == self.life else None
                )
            case Commit():
                client.told += 1
                world.committed.add(client.key.room)
                world.n_committed += 1
                self.memory.check_committed(client.key, action.done.pieces)
                self.memory.allocator.commit(client.key)
                client.decoding = True
                world.at(world.rng.uniform(0.1, 4.0), lambda: self._decoded(client))
            case FailClient():
                client.told += 1
                self.failures.append(action.failure)
                self.memory.allocator.quarantine(client.key)
            case Free():
                self._release(client)
            case FencePeer():
                self.lose()
            case Forget():
                pass

    def _verified(self, client: Client, verified: Verified) -> None:
        assert client.key in self._clients, f"the memory of {client.key} was given back while it was being read"
        self._feed(client, verified)

    def _decoded(self, client: Client) -> None:
        """The answer is complete: its tokens came from memory that was proved, and that nobody wrote to since."""
        if self._clients.get(client.key) is client:
            self._release(client)

    def _release(self, client: Client) -> None:
        self.memory.release(client.key)
        self._end(client)
        self._admit()

    def _end(self, client: Client) -> None:
        del self._clients[client.key]
        self._over.append(client)
