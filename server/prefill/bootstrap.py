"""The prefill node's side of the control connection: one ROUTER socket, one :class:`DecodePeer` per registration."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from socket import socket as TcpSocket
from typing import Protocol

import zmq
import zmq.asyncio

from server.cache.layout import ArenaLayout
from server.failure import Failure
from server.faults.messages import Outbox
from server.prefill.registrations import Registrations, Standing
from server.transfer.addresses import is_ipv6, join_address
from server.transfer.auth import Gatekeeper, Guard
from server.transfer.connections import CHECK_S, Connections
from server.transfer.diagnosis import Wire, WireEvent, end_wire_events, refuses_connections, wire_events
from server.transfer.log_limit import LogLimit
from server.transfer.manifest import PEERS, PROTOCOL_VERSION, Manifest, Mismatch, compare, refusal_label
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import (
    MAX_FRAME_NBYTES,
    AnyMessage,
    FromDecode,
    PeerMessage,
    Ping,
    Pong,
    ProtocolError,
    Refused,
    Register,
    Registered,
    Registration,
    VersionMismatch,
    clip,
    decode,
)
from server.transfer.rooms import TICK_S, Deadlines, Heartbeat
from server.transfer.sockets import frames_of, post

log = logging.getLogger(__name__)

MAX_PEERS = 64
LOOK_AGAIN_S = 0.1
_SENT_AT_MOST, _RECEIVED_AT_MOST = 10_000, 64
"""Frames of one peer that wait in ZMQ. The second, with the frames' size cap, bounds memory: the peer has to wait."""
_REFUSED_REMEMBERED = 16
_HANDSHAKES = {
    Wire.WRONG_KEY: "key",
    Wire.WRONG_MECHANISM: "mechanism",
    Wire.NOT_ZMQ: "protocol",
    Wire.BROKEN_OFF: "broken_off",
}
"""Connections that never came to a frame, as the metrics call them; ``address`` and ``key`` are the Gatekeeper's."""


class DecodePeer:
    """One decode process in one of its registrations: a new transport session is a new peer."""

    def __init__(self, registration: Registration, manifest: Manifest, routing_id: bytes, heartbeat: Heartbeat) -> None:
        self.registration = registration
        self.manifest = manifest
        self.layout: ArenaLayout = manifest.layout()
        self.routing_id = routing_id
        self.heartbeat = heartbeat
        self.lost = False

    @property
    def incarnation(self) -> str:
        return self.manifest.incarnation

    def __str__(self) -> str:
        return f"decode {self.incarnation[:8]}/{self.registration.number} ({self.manifest.session})"


class BootstrapHandler(Protocol):
    """What the prefill node does about its peers. Called in the event loop; must not block."""

    def on_registered(self, peer: DecodePeer) -> None: ...

    def on_message(self, peer: DecodePeer, message: PeerMessage) -> None: ...

    def on_lost(self, peer: DecodePeer, failure: Failure) -> None: ...


class Bootstrap:
    """Registers decode nodes, answers their pings, hands their messages on, and notices when one is gone."""

    def __init__(
        self,
        manifest: Manifest,
        handler: BootstrapHandler,
        deadlines: Deadlines,
        metrics: NodeMetrics,
        guard: Guard | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.manifest = manifest
        self.peers: dict[str, DecodePeer] = {}
        self.port = 0
        self._registrations = Registrations(manifest.incarnation)
        self._handler = handler
        self._deadlines = deadlines
        self._metrics = metrics
        self._guard = guard or Guard()
        self._refused: deque[dict[str, str]] = deque(maxlen=_REFUSED_REMEMBERED)
        self._quiet = LogLimit(log)
        self._outbox = outbox or Outbox()
        self._context = zmq.asyncio.Context()
        self._gatekeeper = Gatekeeper(self._context, self._guard, self._on_not_admitted)
        self._socket: zmq.asyncio.Socket | None = None
        self._connections = Connections(0)
        self._looks: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int, listener: TcpSocket | None = None) -> None:
        """Binds, or takes over ``listener``, which listens there already; ``port`` 0 takes a free one.

        Raises :class:`zmq.ZMQError` if the address is not to be had.
        """
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        self._socket.setsockopt(zmq.SNDHWM, _SENT_AT_MOST)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVED_AT_MOST)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(self._deadlines.register_s * 1000))
        self._socket.setsockopt(zmq.IPV6, is_ipv6(host))
        self._guard.secure_prefill(self._socket)
        self._tasks = [
            asyncio.create_task(self._gatekeeper.run(), name="gatekeeper"),
            asyncio.create_task(self._watch_handshakes(wire_events(self._socket)), name="bootstrap handshakes"),
        ]
        if listener is not None:
            listener.setblocking(False)
            self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(f"tcp://{join_address(host, port)}")
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._connections = Connections(self.port)
        self._tasks += [
            asyncio.create_task(self._receive(self._socket), name="bootstrap receive"),
            asyncio.create_task(self._watch(), name="bootstrap watch"),
            asyncio.create_task(self._cut_unfinished(), name="bootstrap guard"),
        ]

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What the control connection cannot live without."""
        return self._tasks

    async def close(self) -> None:
        tasks = [*self._tasks, *self._looks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            end_wire_events(self._socket)
            self._socket.close()
        self._gatekeeper.close()
        self._context.term()

    def refused(self) -> list[dict[str, str]]:
        """The last decode nodes that were refused, each with the field and both values."""
        return list(self._refused)

    def send(self, peer: DecodePeer, message: AnyMessage) -> None:
        """Queues a message for ``peer``; it is lost if the peer is.

        Raises :class:`ProtocolError` for one over its cap.
        """
        if not peer.lost:
            self._send(peer.routing_id, message)

    def _send(self, routing_id: bytes, message: AnyMessage) -> None:
        self._outbox.send(message, lambda frame: self._put([routing_id, frame]))

    def _put(self, frames: list[bytes]) -> None:
        if self._socket is not None and not self._socket.closed:
            post(self._socket, frames)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        async for frames, fd in frames_of(socket):
            self._metrics.received()
            self._connections.heard(fd, frames[0])
            try:
                self._on_frames(frames)
            except Exception:
                log.exception("a control message could not be handled")
                self._metrics.dropped("error")

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self._metrics.dropped("garbage")
            return
        routing_id, frame = frames
        try:
            message = decode(frame)
        except ProtocolError as error:
            self._metrics.dropped(error.kind)
            log.debug("dropped a control frame: %s", error)
            if isinstance(error, VersionMismatch):
                mismatch = Mismatch("protocol_version", str(PROTOCOL_VERSION), str(error.theirs))
                self._refuse(routing_id, "", 0, mismatch)
            return
        match message:
            case Register():
                self._on_register(routing_id, message)
            case Ping():
                self._on_ping(routing_id, message)
            case PeerMessage():
                self._on_peer_message(routing_id, message)
            case _:
                self._metrics.dropped("direction")

    def _on_register(self, routing_id: bytes, register: Register) -> None:
        theirs, number = register.manifest, register.registration
        mismatch = compare(self.manifest, theirs)
        known = self.peers.get(theirs.incarnation)
        standing = self._registrations.judge(theirs.incarnation, number, routing_id)
        if mismatch is None and known is None and len(self.peers) >= MAX_PEERS:
            mismatch = Mismatch(PEERS, f"at most {MAX_PEERS}", "one more")
        if mismatch is None and standing is Standing.ELSEWHERE:
            mismatch = Mismatch("incarnation", "registered over another connection", theirs.incarnation)
        if mismatch is not None:
            self._metrics.dropped("refused")
            self._refuse(routing_id, theirs.incarnation, number, mismatch)
        elif standing is Standing.OVER:
            self._metrics.dropped("stale")
            self._send(routing_id, Pong(self.manifest.incarnation, number, registered=False))
        elif standing is Standing.CURRENT and known is not None:
            known.heartbeat.heard(time.monotonic())
            self._send(routing_id, Registered(number, self.manifest))
        else:
            self._register(routing_id, register, known)

    def _register(self, routing_id: bytes, register: Register, before: DecodePeer | None) -> None:
        """Begins a registration; the one ``before`` of the same process is over."""
        if before is not None:
            self._lose(before, Failure("peer_lost", f"{before} has registered anew"))
        theirs, number = register.manifest, register.registration
        registration = self._registrations.begin(theirs.incarnation, number, routing_id)
        peer = DecodePeer(registration, theirs, routing_id, Heartbeat(self._deadlines.peer_s, time.monotonic()))
        try:
            self._handler.on_registered(peer)
        except Exception:
            self._registrations.end(registration)
            raise
        self.peers[theirs.incarnation] = peer
        log.info("registered %s", peer)
        self._send(routing_id, Registered(number, self.manifest))

    def _refuse(self, routing_id: bytes, incarnation: str, number: int, mismatch: Mismatch) -> None:
        """Says no to registration ``number``, which is 0 where it is not known."""
        refusal = Refused(number, clip(mismatch.field, 256), clip(mismatch.ours), clip(mismatch.theirs))
        self._quiet.warning(mismatch.field, f"refused decode {incarnation[:8]}: {mismatch}")
        self._metrics.refused(refusal_label(mismatch.field))
        values = {"field": refusal.field, "ours": refusal.ours, "theirs": refusal.theirs}
        self._refused.append({"incarnation": incarnation, **values})
        self._send(routing_id, refusal)

    def _on_not_admitted(self, address: str) -> None:
        reason = "address" if self._guard.keys is None else "key"
        self._metrics.handshake_refused(reason)
        hint = "it has another key" if reason == "key" else "only this machine may connect without --auth-key-file"
        self._quiet.warning(reason, f"did not let a peer at {address} in: {hint}")

    async def _watch_handshakes(self, events: AsyncIterator[WireEvent]) -> None:
        async for told in events:
            event = told.what
            if event is Wire.CONNECTED:
                self._connections.opened(told.fd)
            elif event is Wire.LOST:
                self._on_disconnected(self._connections.closed(told.fd))
            reason = _HANDSHAKES.get(event)
            if reason is not None:
                self._metrics.handshake_refused(reason)
            if event is Wire.WRONG_KEY:
                self._quiet.warning(event, "did not let a peer in: it has another key")
            elif event is Wire.WRONG_MECHANISM:
                whose = "this node has a key and the peer has none, or the other way round"
                self._quiet.warning(event, f"did not let a peer in: {whose}")

    async def _cut_unfinished(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for nbytes in self._connections.cut_unfinished():
                self._metrics.dropped("oversize")
                self._quiet.warning("unfinished", f"cut a connection: {nbytes} bytes of a message that does not end")

    def _on_disconnected(self, routing_id: bytes) -> None:
        for peer in self.peers.values():
            if routing_id and peer.routing_id == routing_id:
                look = asyncio.create_task(self._lose_if_gone(peer), name=f"look at {peer}")
                self._looks.add(look)
                look.add_done_callback(self._looks.discard)

    async def _lose_if_gone(self, peer: DecodePeer) -> None:
        """Its connection broke. A process that has ended refuses connections to its transport session as well."""
        while not peer.lost and not self._connections.has(peer.routing_id):
            if await refuses_connections(peer.manifest.session):
                if not peer.lost:
                    words = f"{peer} is gone: its connection broke, and nobody listens at its transport session"
                    self._lose(peer, Failure("peer_lost", words))
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    def _on_ping(self, routing_id: bytes, ping: Ping) -> None:
        meant = Registration(self.manifest.incarnation, ping.decode, ping.registration)
        peer = self.peers.get(ping.decode)
        is_known = peer is not None and self._registrations.is_current(meant, routing_id)
        if peer is not None and is_known:
            peer.heartbeat.heard(time.monotonic())
        self._send(routing_id, Pong(self.manifest.incarnation, ping.registration, is_known))

    def _on_peer_message(self, routing_id: bytes, message: PeerMessage) -> None:
        """What belongs to no current registration is dropped.

        Nobody waits for an answer to it: a decode node that still believes in that registration hears the truth with
        its next ``Pong``.
        """
        peer = self.peers.get(message.decode)
        if peer is None or not self._registrations.covers(message, routing_id):
            self._metrics.dropped("stale")
        elif not isinstance(message, FromDecode):
            self._metrics.dropped("direction")
        else:
            peer.heartbeat.heard(time.monotonic())
            self._handler.on_message(peer, message)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for peer in list(self.peers.values()):
                if peer.heartbeat.tick(now, TICK_S):
                    silent_s = peer.heartbeat.silent_for(now)
                    self._lose(peer, Failure("peer_lost", f"{peer} was silent for {silent_s:.1f} s"))

    def _lose(self, peer: DecodePeer, failure: Failure) -> None:
        log.warning("lost a peer: %s", failure.reason)
        peer.lost = True
        self._registrations.end(peer.registration)
        self.peers.pop(peer.incarnation, None)
        try:
            self._handler.on_lost(peer, failure)
        except Exception:
            log.exception("losing %s could not be handled", peer)
