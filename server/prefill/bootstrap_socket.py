"""The prefill node's ZMQ ROUTER socket: frames in and out, who is let in, and what happens to its connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from socket import socket as TcpSocket

import zmq
import zmq.asyncio

from server.faults.hooks import Hooks
from server.prefill.bootstrap import Bootstrap
from server.transfer.addresses import is_ipv6, join_address
from server.transfer.auth import Gatekeeper, Guard
from server.transfer.connections import CHECK_S, Connections
from server.transfer.diagnosis import Wire, WireEvent, end_wire_events, wire_events
from server.transfer.frames import encode
from server.transfer.log_limit import LogLimit
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import MAX_FRAME_NBYTES, AnyMessage
from server.transfer.sockets import frames_of, post

log = logging.getLogger(__name__)

_SENT_AT_MOST, _RECEIVED_AT_MOST = 10_000, 64
"""Frames of one peer that wait in ZMQ. The second, with the frames' size cap, bounds memory: the peer has to wait."""
_HANDSHAKES = {
    Wire.WRONG_KEY: "key",
    Wire.WRONG_MECHANISM: "mechanism",
    Wire.NOT_ZMQ: "protocol",
    Wire.BROKEN_OFF: "broken_off",
}
"""Connections that never came to a frame, as the metrics call them; ``address`` and ``key`` are the Gatekeeper's."""


class BootstrapSocket:
    """The :class:`~server.prefill.decode_peer.ControlSocket` of a running node. ``handshake_s`` in seconds."""

    def __init__(self, guard: Guard, metrics: NodeMetrics, handshake_s: float, hooks: Hooks) -> None:
        self.port = 0
        self.tasks: list[asyncio.Task[None]] = []
        """What the control connection cannot live without."""
        self._guard = guard
        self._metrics = metrics
        self._handshake_s = handshake_s
        self._hooks = hooks
        self._log_limit = LogLimit(log)
        self._context = zmq.asyncio.Context()
        self._gatekeeper = Gatekeeper(self._context, guard, self._on_not_admitted)
        self._socket: zmq.asyncio.Socket | None = None
        self._connections = Connections(0)

    async def start(self, bootstrap: Bootstrap, host: str, port: int, listener: TcpSocket | None = None) -> None:
        """Binds, or takes over ``listener``, which listens there already; ``port`` 0 takes a free one. ``bootstrap``
        gets every message from now on, and every connection that breaks.

        Raises :class:`zmq.ZMQError` if the address is not to be had.
        """
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        self._socket.setsockopt(zmq.SNDHWM, _SENT_AT_MOST)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVED_AT_MOST)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(self._handshake_s * 1000))
        self._socket.setsockopt(zmq.IPV6, is_ipv6(host))
        self._guard.secure_prefill(self._socket)
        self.tasks = [
            asyncio.create_task(self._gatekeeper.run(), name="gatekeeper"),
            asyncio.create_task(self._watch(wire_events(self._socket), bootstrap), name="bootstrap handshakes"),
        ]
        if listener is not None:
            listener.setblocking(False)
            self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(f"tcp://{join_address(host, port)}")
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._connections = Connections(self.port)
        self.tasks += [
            asyncio.create_task(self._receive(self._socket, bootstrap), name="bootstrap receive"),
            asyncio.create_task(self._cut_unfinished(), name="bootstrap guard"),
        ]

    async def close(self) -> None:
        if self._socket is not None:
            end_wire_events(self._socket)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        self._gatekeeper.close()
        self._context.destroy()  # term would wait for ever for a socket that a task has left open

    def send(self, routing_id: bytes, message: AnyMessage) -> None:
        self._hooks.post(message, encode(message), lambda frame: self._put([routing_id, frame]))

    def is_connected(self, routing_id: bytes) -> bool:
        return self._connections.has(routing_id)

    @property
    def connections(self) -> tuple[int, ...]:
        """The open connections, by file descriptor."""
        return self._connections.fds

    def _put(self, frames: list[bytes]) -> None:
        if self._socket is not None and not self._socket.closed:
            post(self._socket, frames)

    async def _receive(self, socket: zmq.asyncio.Socket, bootstrap: Bootstrap) -> None:
        async for frames, fd in frames_of(socket):
            self._metrics.received()
            self._connections.heard(fd, frames[0])
            try:
                bootstrap.on_frames(frames)
            except Exception:
                log.exception("a control message could not be handled")
                self._metrics.dropped("error")

    def _on_not_admitted(self, address: str) -> None:
        reason = "address" if self._guard.keys is None else "key"
        self._metrics.handshake_refused(reason)
        hint = "it has another key" if reason == "key" else "only this machine may connect without --auth-key-file"
        self._log_limit.warning(reason, f"did not let a peer at {address} in: {hint}")

    async def _watch(self, events: AsyncIterator[WireEvent], bootstrap: Bootstrap) -> None:
        async for event in events:
            if event.what is Wire.CONNECTED:
                self._connections.opened(event.fd)
            elif event.what is Wire.LOST:
                routing_id = self._connections.closed(event.fd)
                if routing_id:
                    bootstrap.on_disconnected(routing_id)
            reason = _HANDSHAKES.get(event.what)
            if reason is not None:
                self._metrics.handshake_refused(reason)
            if event.what is Wire.WRONG_KEY:
                self._log_limit.warning(event.what, "did not let a peer in: it has another key")
            elif event.what is Wire.WRONG_MECHANISM:
                whose = "this node has a key and the peer has none, or the other way round"
                self._log_limit.warning(event.what, f"did not let a peer in: {whose}")

    async def _cut_unfinished(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for nbytes in self._connections.cut_unfinished():
                self._metrics.dropped("oversize")
                line = f"cut a connection: {nbytes} bytes of a message that does not end"
                self._log_limit.warning("unfinished", line)
