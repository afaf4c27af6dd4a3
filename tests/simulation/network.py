"""The simulated control connections: messages are lost, doubled and late, connections break and come back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from server.failure import Failure
from server.transfer.diagnosis import Finding
from server.transfer.frames import decode, encode
from server.transfer.protocol import AnyMessage, Committed, Ping, Pong, PromptLogprobsPart, Register, Reserve
from server.transfer.rooms import RoomKey

if TYPE_CHECKING:
    from server.prefill.bootstrap import Bootstrap
    from tests.simulation.loop import Process
    from tests.simulation.world import World

DELAY_S = 0.01
SLOWEST_S = 8.0
CONNECT_S = 0.05
LOOK_S = 0.2
LONGEST_BREAK_S = 8.0


class Network:
    """All connections. A message goes to whoever has the place of the process that it was meant for when it comes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sockets: dict[str, SimulatedSocket] = {}
        self._dialers: dict[tuple[str, str], SimulatedDialer] = {}
        self._broken_until = {"to prefill": 0.0, "to decode": 0.0}
        self._registered: dict[tuple[str, int], str] = {}
        """The transport session of a decode process's registration."""
        self._routing_ids = itertools.count(1)

    # --- the ends ---

    def listen(self, socket: SimulatedSocket) -> None:
        self._sockets[socket.address] = socket
        for dialer in self._dialers_to(socket.address):
            dialer.try_again()

    def attach(self, dialer: SimulatedDialer) -> bytes:
        """The dialer's routing id."""
        self._dialers[dialer.host, dialer.address] = dialer
        return f"D{next(self._routing_ids)}".encode()

    def listener_at(self, address: str) -> SimulatedSocket | None:
        socket = self._sockets.get(address)
        return socket if socket is not None and not socket.process.is_dead else None

    def hung_up(self, address: str) -> None:
        """The process at ``address`` is dead. The others may be told so at once by its system, or never."""
        for dialer in self._dialers_to(address):
            dialer.broke(is_gone=self._world.rng.random() < 0.5)
        for host, dialer in self._dialers.items():
            socket = self.listener_at(dialer.address)
            if host[0] == address and socket is not None and self._world.rng.random() < 0.5:
                socket.disconnected(dialer.routing_id)

    def break_one(self) -> None:
        """Nothing comes through in one direction, or in both; or one end takes the other for gone."""
        rng = self._world.rng
        until = self._world.loop.time() + rng.uniform(0.5, LONGEST_BREAK_S)
        dialer = rng.choice(list(self._dialers.values()))
        socket = self.listener_at(dialer.address)
        match rng.randrange(5):
            case 0:
                self._broken_until["to prefill"] = until
            case 1:
                self._broken_until["to decode"] = until
            case 2:
                self._broken_until = dict.fromkeys(self._broken_until, until)
            case 3:
                dialer.broke(is_gone=True)
            case _ if socket is not None:
                socket.lose(dialer.routing_id)

    def _dialers_to(self, address: str) -> list[SimulatedDialer]:
        return [dialer for dialer in self._dialers.values() if dialer.address == address]

    # --- messages ---

    def to_prefill(self, dialer: SimulatedDialer, frame: bytes) -> None:
        message = decode(frame)
        self._note(message)
        routing_id, address = dialer.routing_id, dialer.address

        def deliver() -> None:
            socket = self.listener_at(address)
            if socket is not None:
                socket.process.run(socket.deliver, routing_id, frame)

        self._post("to prefill", message, deliver)

    def to_decode(self, routing_id: bytes, message: AnyMessage) -> None:
        if isinstance(message, PromptLogprobsPart) and self._world.hits(self._world.weather.bad_bytes):
            message = msgspec.structs.replace(message, rows=bytes((message.rows[0] ^ 1,)) + message.rows[1:])
        frame = encode(message)
        meant = next((end for end, dialer in self._dialers.items() if dialer.routing_id == routing_id), None)

        def deliver() -> None:
            if meant is not None:
                dialer = self._dialers[meant]
                dialer.process.run(dialer.deliver, frame)

        self._post("to decode", message, deliver)

    def _note(self, message: AnyMessage) -> None:
        """In which transport session a room was reserved, and for which of its request's attempts."""
        if isinstance(message, Register):
            self._registered[message.manifest.incarnation, message.registration] = message.manifest.session
        elif isinstance(message, Reserve):
            key = RoomKey(message.room, message.epoch, message.decode)
            session = self._registered[message.decode, message.registration]
            self._world.sessions.reserved_in.setdefault(key, session)
            self._world.reserved(message)
        elif isinstance(message, Committed):
            self._world.proved(RoomKey.of(message))

    def _post(self, direction: str, message: AnyMessage, deliver: Callable[[], None]) -> None:
        """Nobody waits for heartbeats: they go on for ever."""
        world, weather = self._world, self._world.weather
        later = world.loop.call_later if isinstance(message, Ping | Pong) else world.later
        for _ in range(2 if world.hits(weather.duplicate) else 1):
            is_broken = not world.calm and world.loop.time() < self._broken_until[direction]
            if not is_broken and not world.hits(weather.loss):
                later(self._delay_s(), deliver)

    def _delay_s(self) -> float:
        world = self._world
        if world.hits(world.weather.late):
            return world.rng.uniform(0, world.latest_s)
        return world.rng.uniform(0, SLOWEST_S) if world.hits(world.weather.slow) else DELAY_S


class SimulatedSocket:
    """A prefill node's :class:`~server.prefill.decode_peer.ControlSocket`, at ``address``."""

    def __init__(self, world: World, process: Process, address: str) -> None:
        self.address = address
        self.process = process
        self._world = world
        self._connected: set[bytes] = set()
        self._bootstrap: Bootstrap | None = None

    def start(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._world.network.listen(self)

    def send(self, routing_id: bytes, message: AnyMessage) -> None:
        if not self.process.is_dead:
            self._world.network.to_decode(routing_id, message)

    def is_connected(self, routing_id: bytes) -> bool:
        return routing_id in self._connected

    def deliver(self, routing_id: bytes, frame: bytes) -> None:
        self._connected.add(routing_id)
        bootstrap = self._bootstrap
        if bootstrap is None:
            return
        before = {name: peer.registration.number for name, peer in bootstrap.peers.items()}
        bootstrap.on_frames([routing_id, frame])
        for name, peer in bootstrap.peers.items():
            was, number = before.get(name, 0), peer.registration.number
            self._world.check(was <= number, f"registration {was} was ended by one with number {number}")

    def disconnected(self, routing_id: bytes) -> None:
        """The connection breaks, as this end sees it."""
        if routing_id in self._connected and self._bootstrap is not None:
            self._connected.remove(routing_id)
            self.process.run(self._bootstrap.on_disconnected, routing_id)

    def lose(self, routing_id: bytes) -> None:
        """This end takes whoever is connected there for gone."""
        for peer in list(self._bootstrap.peers.values()) if self._bootstrap is not None else ():
            if peer.routing_id == routing_id and self._bootstrap is not None:
                self.process.run(self._bootstrap.lose, peer, Failure("peer_lost", "simulated"))


class SimulatedDialer:
    """A decode node's :class:`~server.decode.dialer.Dialer`: ``host`` is the node, ``address`` its prefill node's."""

    def __init__(
        self,
        world: World,
        process: Process,
        host: str,
        address: str,
        on_frames: Callable[[list[bytes]], None],
        on_trouble: Callable[[Finding], None],
        on_connected: Callable[[], None],
    ) -> None:
        self.host, self.address = host, address
        self.process = process
        self.connected = self.given_up = False
        self._world = world
        self._on_frames, self._on_trouble, self._on_connected = on_frames, on_trouble, on_connected
        self._is_open = False
        self.routing_id = world.network.attach(self)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return []

    @property
    def peer_hosts(self) -> frozenset[str]:
        return frozenset()  # addresses are names here

    def open(self) -> None:
        self.close()
        self._is_open = True
        self.try_again()

    def close(self) -> None:
        self._is_open = self.connected = False

    async def end(self) -> None:
        self.close()

    def send(self, frame: bytes) -> None:
        if self.connected and not self.process.is_dead:
            self._world.network.to_prefill(self, frame)

    def look(self) -> None:
        self.process.later(LOOK_S, self._report)

    def deliver(self, frame: bytes) -> None:
        if self._is_open:
            self._on_frames([frame])

    def try_again(self) -> None:
        self.process.later(CONNECT_S, self._connect)

    def broke(self, *, is_gone: bool) -> None:
        """The connection breaks. ``is_gone``: the system there says that nobody listens."""
        if self.connected:
            self.connected = False
            if is_gone:
                self.process.later(LOOK_S, self._on_trouble, Finding("simulated", gone=True))
            self.process.later(self._world.rng.uniform(CONNECT_S, 1.0), self._connect)

    def _connect(self) -> None:
        if self._is_open and not self.connected and self._world.network.listener_at(self.address) is not None:
            self.connected = True
            self._on_connected()

    def _report(self) -> None:
        if not self.connected:
            is_gone = self._world.network.listener_at(self.address) is None
            self._on_trouble(Finding("simulated", gone=is_gone))
