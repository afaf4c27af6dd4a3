"""The DEALER socket to one prefill node: opened, secured, watched, and looked into when it does not connect."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from server.transfer.auth import Guard
from server.transfer.bootstrap import frames_of, post
from server.transfer.handshake import Finding, Wire, end_wire_events, look_at, wire_events
from server.transfer.protocol import MAX_SMALL_FRAME_NBYTES
from server.transfer.rooms import Deadlines

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_RECEIVED_AT_MOST = 256
"""Frames that wait in ZMQ for this process; with their size cap a bound on memory."""


class Dialer:
    """One connection at a time to ``address``.

    ``on_frames`` gets what arrives. ``on_trouble`` is told why there is no connection, about once a second while there
    is none. ``given_up``: ZMQ has stopped to try, as it does after some refusals; :meth:`open` again. The routing id is
    drawn once: it shows the prefill node that a new connection is of the same process.
    """

    def __init__(
        self,
        address: str,
        guard: Guard,
        deadlines: Deadlines,
        on_frames: Callable[[list[bytes]], None],
        on_trouble: Callable[[Finding], None],
    ) -> None:
        self.address = address
        self.socket: zmq.asyncio.Socket | None = None
        self.connected = False
        self._guard, self._deadlines = guard, deadlines
        self._on_frames, self._on_trouble = on_frames, on_trouble
        self._context = zmq.asyncio.Context()
        self._routing_id = b"D" + secrets.token_bytes(16)
        self._tasks: list[asyncio.Task[None]] = []
        self._look: asyncio.Task[None] | None = None
        self._looked = float("-inf")
        self._trouble = Wire.NOT_CONNECTED
        self.given_up = False

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What the connection cannot live without."""
        return self._tasks

    def open(self) -> None:
        """Connects with a fresh socket; closes the one before."""
        self.close()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_SMALL_FRAME_NBYTES)
        socket.setsockopt(zmq.RCVHWM, _RECEIVED_AT_MOST)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, round(self._deadlines.connect_s * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(self._deadlines.register_s * 1000))
        socket.setsockopt(zmq.ROUTING_ID, self._routing_id)
        self._guard.secure_decode(socket)
        self.socket, self.connected, self.given_up = socket, False, False
        self._tasks = [
            asyncio.create_task(self._watch(socket), name=f"watch {self.address}"),
            asyncio.create_task(self._receive(socket), name=f"receive {self.address}"),
        ]
        socket.connect(f"tcp://{self.address}")

    def close(self) -> None:
        """Drops the connection; what was sent last may still go out."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self.connected = False
        if self.socket is not None:
            end_wire_events(self.socket)
            self.socket.close()
            self.socket = None

    async def end(self) -> None:
        """Closes for good."""
        tasks = [*self._tasks, *([self._look] if self._look else [])]
        if self._look is not None:
            self._look.cancel()
        self.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.term()

    def send(self, frame: bytes) -> None:
        """Queues a frame; it is lost if there is no connection."""
        if self.socket is not None:
            post(self.socket, [frame])

    def look(self) -> None:
        """Finds out in the background why there is no connection, at most once a second."""
        is_looking = self._look is not None and not self._look.done()
        if not is_looking and time.monotonic() - self._looked >= _LOOK_AGAIN_S:
            self._looked = time.monotonic()
            self._look = asyncio.create_task(self._find_out(self._trouble), name=f"look at {self.address}")

    async def _find_out(self, event: Wire) -> None:
        finding = await look_at(self.address, self._guard.mechanism, event)
        if not self.connected:
            self._on_trouble(finding)

    async def _watch(self, socket: zmq.asyncio.Socket) -> None:
        async for event in wire_events(socket):
            if event is Wire.READY:
                self.connected = True
            elif event is Wire.LOST:
                self.connected = False
            elif event is not Wire.CONNECTED:
                self.given_up = event not in (Wire.NOT_CONNECTED, Wire.BROKEN_OFF)
                self._trouble = event
                self.look()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        async for frames in frames_of(socket):
            self._on_frames(frames)
