"""The simulated decode node: the real room state machine and allocator, driven as the node drives them."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.cache.handoff import prompt_hash
from server.cache.layout import Placement
from server.transfer.decode_room import (
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
from server.transfer.protocol import (
    Abort,
    AnyMessage,
    Committed,
    Done,
    Progress,
    Rejected,
    Reserve,
    RoomIds,
    RoomMessage,
    RoomRequest,
    RoutedRequest,
    Sampling,
    Waiting,
    ids_of,
    pack_tokens,
)
from server.transfer.protocol import Failed as FailedMessage
from server.transfer.rooms import Failure, Forget, GivenUp, PeerLost, RoomKey, Send, Tick
from tests.transfer.simulation.memory import N_TOKENS, Memory

if TYPE_CHECKING:
    from tests.transfer.simulation.world import World

PREFILL = "a" * 32
LOST = Failure("peer_lost", "simulated", 502)
ABORTED = Failure("aborted", "simulated", 499)
SAMPLING = Sampling(1, 0, 0.0, 1.0, 0, 1, (), (), False, None)


@dataclass
class Client:
    """One request: ``told`` counts the answers to its client, of which there must be one. ``room`` None: it waits."""

    key: RoomKey
    room: DecodeRoom | None = None
    session: int = 0
    placement: Placement | None = None
    is_routed: bool = False
    told: int = 0
    decoding: bool = False


class SimulatedDecode:
    """``life`` counts its processes: a crash forgets everything, and the clients of the dead process with it."""

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
        self._session = 0

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

    # --- requests ---

    def ask(self, named: int | None = None) -> None:
        """A client comes, with the room that a router ``named`` or one of this node's own.

        The ids of rooms come again, as soon as the node is finished with them.
        """
        used = {key.room for key in self._clients}
        room = next(room for room in range(100, 200) if room not in used) if named is None else named
        client = Client(RoomKey(room, next(self._epochs), f"{self.life:032x}"), is_routed=named is not None)
        self._clients[client.key] = client
        self._waiting.append(client)
        self._admit()

    def _admit(self) -> None:
        while self._session and self._waiting:
            client = self._waiting[0]
            placement = self.memory.reserve(client.key)
            if placement is None:
                return
            self._waiting.popleft()
            self._open(client, placement)

    def _open(self, client: Client, placement: Placement) -> None:
        key = client.key
        request: RoomRequest | RoutedRequest = RoomRequest(f"r{key.epoch}", pack_tokens(range(N_TOKENS)), SAMPLING)
        if client.is_routed:
            request = RoutedRequest(f"r{key.epoch}", N_TOKENS, prompt_hash(range(N_TOKENS)), SAMPLING)
        reserve = Reserve(
            PREFILL, key.decode, key.room, key.epoch, placement.slot, placement.pages, ("swa",), request, 30.0
        )
        client.room, client.session, client.placement = (
            DecodeRoom(reserve, self._world.deadlines, self._world.now),
            self._session,
            placement,
        )
        self._feed(client, Opened())

    def tick(self) -> None:
        for client in list(self._clients.values()):
            if self._world.hits(self._world.weather.abort):
                self._abort(client)
            elif client.is_routed and client.room is None:
                self._world.to_prefill(Waiting(**_ids(client.key)))
            self._feed(client, Tick())

    def _end_waiting(self, client: Client) -> None:
        self._waiting.remove(client)
        client.told += 1
        self._end(client)

    def _abort(self, client: Client) -> None:
        if client.room is None:
            self._end_waiting(client)
            if client.is_routed:
                self._world.to_prefill(Abort(**_ids(client.key), reason="simulated"))
        elif client.room.active:
            self._feed(client, GivenUp(ABORTED))

    # --- the peer ---

    def registered(self, session: int) -> None:
        self._session = session
        self._admit()

    def lost(self, session: int) -> None:
        self._session = 0
        for client in self._of(session):
            self._feed(client, PeerLost(LOST))
        for client in [client for client in self._waiting if client.is_routed]:
            self._end_waiting(client)

    def fenced(self, session: int) -> None:
        for client in self._of(session):
            self._feed(client, Fenced())

    def _of(self, session: int) -> list[Client]:
        return [client for client in self._clients.values() if client.session == session]

    def deliver(self, message: AnyMessage) -> None:
        assert isinstance(message, RoomMessage)
        assert not isinstance(message, Reserve | Abort | Committed | Rejected)
        client = self._clients.get(RoomKey(message.room, message.epoch, message.decode))
        if client is not None and client.room is None and isinstance(message, FailedMessage):
            self._end_waiting(client)
        elif client is not None and not client.decoding:
            self._feed(client, message)  # type: ignore[arg-type]
        elif isinstance(message, Done) and self._was_committed(message):
            self._world.to_prefill(Committed(**ids_of(message)))
        elif client is None and isinstance(message, Progress | Done | FailedMessage):
            self._world.to_prefill(Abort(**ids_of(message), reason="unknown room"))

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
                bad = Failure("component_mismatch", "simulated", 502, "swa")
                verified = Verified(bad if world.hits(world.weather.bad_digest) else None)
                life = self.life
                world.at(
                    world.rng.uniform(0, 3.0), lambda: self._verified(client, verified) if life == self.life else None
                )
            case Commit():
                client.told += 1
                world.committed.add(client.key.room)
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
                world.end_session(0.0)
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


def _ids(key: RoomKey) -> RoomIds:
    return {"prefill": PREFILL, "decode": key.decode, "room": key.room, "epoch": key.epoch}
