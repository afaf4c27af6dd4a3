"""The DEALER socket to one prefill node: opened, secured, watched, and looked into when it does not connect."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import zmq
import zmq.asyncio

from server.transfer.addresses import is_ipv6, split_address
from server.transfer.auth import Guard
from server.transfer.connections import CHECK_S, Connections
from server.transfer.diagnosis import Finding, Wire, WireEvent, end_wire_events, look_at, wire_events
from server.transfer.log_limit import LogLimit
from server.transfer.protocol import MAX_SMALL_FRAME_NBYTES
from server.transfer.rooms import Deadlines
from server.transfer.sockets import frames_of, post

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_LOST_LOOK_AGAIN_S = 0.1
_RECEIVED_AT_MOST = 256
"""Frames that wait in ZMQ for this process; with their size cap a bound on memory."""


class Dialer(Protocol):
    """The port through which a :class:`~.prefill_link.PrefillLink` speaks to its prefill node: one connection at a
    time. ``given_up``: it has stopped to try; :meth:`open` again.
    """

    connected: bool
    given_up: bool

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What the connection cannot live without."""
        ...

    @property
    def peer_hosts(self) -> frozenset[str]:
        """The addresses that the connection leads to, mostly one; none while there is none."""
        ...

    def open(self) -> None:
        """Connects anew; closes the connection before."""
        ...

    def close(self) -> None:
        """Drops the connection; what was sent last may still go out."""
        ...

    async def end(self) -> None:
        """Closes for good."""
        ...

    def send(self, frame: bytes) -> None:
        """Queues a frame; it is lost if there is no connection."""
        ...

    def look(self) -> None:
        """Finds out in the background why there is no connection."""
        ...


MakeDialer = Callable[[str, Callable[[list[bytes]], None], Callable[[Finding], None], Callable[[], None]], Dialer]
"""``(address, on_frames, on_trouble, on_connected)``: ``on_frames`` gets what arrives, ``on_trouble`` why there is no
connection, as long as there is none, ``on_connected`` is called whenever there is one, perhaps again.
"""


class ZmqDialer:
    """The DEALER socket to ``address``. All callbacks are called in the event loop.

    ``on_trouble`` is called about once a second, and more often after a connection broke. ZMQ gives up after some
    refusals. The routing id is drawn once: it shows the prefill node that a new connection is of the same process.
    """

    def __init__(
        self,
        address: str,
        on_frames: Callable[[list[bytes]], None],
        on_trouble: Callable[[Finding], None],
        on_connected: Callable[[], None],
        *,
        guard: Guard,
        deadlines: Deadlines,
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self.socket: zmq.asyncio.Socket | None = None
        self.connected, self.given_up = False, False
        self._guard, self._deadlines, self._clock = guard, deadlines, clock
        self._on_frames, self._on_trouble, self._on_connected = on_frames, on_trouble, on_connected
        self._host, self._port = split_address(address)
        self._context = zmq.asyncio.Context()
        self._routing_id = b"D" + secrets.token_bytes(16)
        self._tasks: list[asyncio.Task[None]] = []
        self._look: asyncio.Task[None] | None = None
        self._looked = float("-inf")
        self._trouble = Wire.NOT_CONNECTED
        self._connections = Connections(self._port)
        self._log_limit = LogLimit(log)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return self._tasks

    @property
    def peer_hosts(self) -> frozenset[str]:
        return self._connections.peer_hosts

    def open(self) -> None:
        self.close()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_SMALL_FRAME_NBYTES)
        socket.setsockopt(zmq.RCVHWM, _RECEIVED_AT_MOST)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.IPV6, is_ipv6(self._host))
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, round(self._deadlines.connect_s * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(self._deadlines.register_s * 1000))
        socket.setsockopt(zmq.ROUTING_ID, self._routing_id)
        self._guard.secure_decode(socket)
        self.socket, self.connected, self.given_up = socket, False, False
        self._connections = Connections(self._port)
        self._tasks = [
            asyncio.create_task(self._watch(wire_events(socket)), name=f"watch {self.address}"),
            asyncio.create_task(self._receive(socket), name=f"receive {self.address}"),
            asyncio.create_task(self._cut_unfinished(self._connections), name=f"guard {self.address}"),
        ]
        socket.connect(f"tcp://{self.address}")

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self.connected = False
        if self.socket is not None:
            end_wire_events(self.socket)
            self.socket.close()
            self.socket = None

    async def end(self) -> None:
        tasks = [*self._tasks, *([self._look] if self._look else [])]
        if self._look is not None:
            self._look.cancel()
        self.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy()  # term would wait for ever for a socket that a task has left open

    def send(self, frame: bytes) -> None:
        if self.socket is not None:
            post(self.socket, [frame])

    def look(self) -> None:
        """At most once a second."""
        is_looking = self._look is not None and not self._look.done()
        if not is_looking and self._clock() - self._looked >= _LOOK_AGAIN_S:
            self._looked = self._clock()
            self._look = asyncio.create_task(self._find_out(self._trouble), name=f"look at {self.address}")

    async def _find_out(self, event: Wire) -> None:
        self._report(await look_at(self.address, self._guard.mechanism, event))

    def _report(self, finding: Finding) -> None:
        if not self.connected:
            self._on_trouble(finding)

    async def _find_out_if_gone(self) -> None:
        """A connection broke: a process that has ended refuses the next one, as soon as its ports are closed."""
        end = self._clock() + self._deadlines.peer_s
        while not self.connected and self._clock() < end:
            finding = await look_at(self.address, self._guard.mechanism, Wire.LOST)
            while self.socket is not None and int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:  # noqa: ASYNC110
                await asyncio.sleep(0)  # what the process said last is heard before its end
            self._report(finding)
            if finding.gone:
                return
            await asyncio.sleep(_LOST_LOOK_AGAIN_S)

    async def _watch(self, events: AsyncIterator[WireEvent]) -> None:
        connections = self._connections
        async for event in events:
            match event.what:
                case Wire.CONNECTED:
                    connections.opened(event.fd)
                case Wire.READY:
                    self.connected = True
                    self._on_connected()
                case Wire.LOST:
                    connections.closed(event.fd)
                    self._lost()
                case trouble:
                    self.given_up = trouble not in (Wire.NOT_CONNECTED, Wire.BROKEN_OFF)
                    self._trouble = trouble
                    self.look()

    def _lost(self) -> None:
        was_connected, self.connected = self.connected, False
        if was_connected and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._find_out_if_gone(), name=f"look at {self.address}")

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        async for frames, fd in frames_of(socket):
            self._connections.heard(fd)
            self._on_frames(frames)

    async def _cut_unfinished(self, connections: Connections) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for nbytes in connections.cut_unfinished():
                words = f"cut the connection to prefill {self.address}: {nbytes} bytes of a message that does not end"
                self._log_limit.warning("unfinished", words)
