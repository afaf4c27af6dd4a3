"""Which decode nodes are registered: answers their first message and their pings, hands the rest on, and notices when
one is gone. The socket below it is :mod:`.bootstrap_socket`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from server.failure import Failure
from server.prefill.decode_peer import ControlSocket, DecodePeer
from server.prefill.registrations import Registrations, Standing
from server.prefill.room_manager import PrefillRoomManager
from server.transfer.diagnosis import refuses_connections
from server.transfer.frames import ProtocolError, VersionMismatch, decode
from server.transfer.log_limit import LogLimit
from server.transfer.manifest import PEERS, PROTOCOL_VERSION, Manifest, Mismatch, compare, refusal_label
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import (
    AnyMessage,
    FromDecode,
    PeerMessage,
    Ping,
    Pong,
    Refused,
    Register,
    Registered,
    Registration,
    clip,
)
from server.transfer.rooms import TICK_S, Deadlines, Heartbeat

log = logging.getLogger(__name__)

MAX_PEERS = 64
LOOK_AGAIN_S = 0.1
_REFUSED_REMEMBERED = 16


class Bootstrap:
    """One :class:`DecodePeer` per registration, for ``manager``. Lives in the event loop.

    Its ports, so that a simulation can drive it without a network:

    - messages go out by ``socket`` and come in by :meth:`on_frames` (or, decoded, by :meth:`on_message`); a connection
      that broke is reported to :meth:`on_disconnected`;
    - ``is_refused`` says of a transport session's ``host:port`` whether nobody listens there any more;
    - time is ``clock``, in seconds, and the event loop's.
    """

    def __init__(
        self,
        manifest: Manifest,
        manager: PrefillRoomManager,
        socket: ControlSocket,
        deadlines: Deadlines,
        metrics: NodeMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_refused: Callable[[str], Awaitable[bool]] = refuses_connections,
    ) -> None:
        self.manifest = manifest
        self.peers: dict[str, DecodePeer] = {}
        self.tasks: list[asyncio.Task[None]] = []
        """What the registrations cannot live without."""
        self._registrations = Registrations(manifest.incarnation)
        self._manager = manager
        self._socket = socket
        self._deadlines = deadlines
        self._metrics = metrics
        self._clock = clock
        self._is_refused = is_refused
        self._refused: deque[dict[str, str]] = deque(maxlen=_REFUSED_REMEMBERED)
        self._log_limit = LogLimit(log)
        self._looks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Looks at the peers' silence from now on."""
        self.tasks = [asyncio.create_task(self._watch(), name="bootstrap watch")]

    async def close(self) -> None:
        tasks = [*self.tasks, *self._looks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refused(self) -> list[dict[str, str]]:
        """The last decode nodes that were refused, each with the field and both values."""
        return list(self._refused)

    # --- messages -----------------------------------------------------------------------------------------------------

    def on_frames(self, frames: list[bytes]) -> None:
        """Takes one ZMQ message: the routing id of its connection, and one frame."""
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
        self.on_message(routing_id, message)

    def on_message(self, routing_id: bytes, message: AnyMessage) -> None:
        """Takes a message that came over the connection ``routing_id``."""
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
            self._socket.send(routing_id, Pong(self.manifest.incarnation, number, registered=False))
        elif standing is Standing.CURRENT and known is not None:
            known.heartbeat.heard(self._clock())
            self._socket.send(routing_id, Registered(number, self.manifest))
        else:
            self._register(routing_id, register, known)

    def _register(self, routing_id: bytes, register: Register, before: DecodePeer | None) -> None:
        """Begins a registration; the one ``before`` of the same process is over."""
        if before is not None:
            self.lose(before, Failure("peer_lost", f"{before} has registered anew"))
        theirs, number = register.manifest, register.registration
        registration = self._registrations.begin(theirs.incarnation, number, routing_id)
        heartbeat = Heartbeat(self._deadlines.peer_s, self._clock())
        peer = DecodePeer(registration, theirs, routing_id, heartbeat, self._socket)
        try:
            self._manager.on_registered(peer)
        except Exception:
            self._registrations.end(registration)
            raise
        self.peers[theirs.incarnation] = peer
        log.info("registered %s", peer)
        self._socket.send(routing_id, Registered(number, self.manifest))

    def _refuse(self, routing_id: bytes, incarnation: str, number: int, mismatch: Mismatch) -> None:
        """Says no to registration ``number``, which is 0 where it is not known."""
        refusal = Refused(number, clip(mismatch.field, 256), clip(mismatch.ours), clip(mismatch.theirs))
        self._log_limit.warning(mismatch.field, f"refused decode {incarnation[:8]}: {mismatch}")
        self._metrics.refused(refusal_label(mismatch.field))
        values = {"field": refusal.field, "ours": refusal.ours, "theirs": refusal.theirs}
        self._refused.append({"incarnation": incarnation, **values})
        self._socket.send(routing_id, refusal)

    def on_disconnected(self, routing_id: bytes) -> None:
        """The last connection of this peer broke."""
        for peer in self.peers.values():
            if peer.routing_id == routing_id:
                look = asyncio.create_task(self._lose_if_gone(peer), name=f"look at {peer}")
                self._looks.add(look)
                look.add_done_callback(self._looks.discard)

    async def _lose_if_gone(self, peer: DecodePeer) -> None:
        """Its connection broke. A process that has ended refuses connections to its transport session as well."""
        while not peer.lost and not self._socket.is_connected(peer.routing_id):
            if await self._is_refused(peer.manifest.session):
                if not peer.lost:
                    words = f"{peer} is gone: its connection broke, and nobody listens at its transport session"
                    self.lose(peer, Failure("peer_lost", words))
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    def _on_ping(self, routing_id: bytes, ping: Ping) -> None:
        meant = Registration(self.manifest.incarnation, ping.decode, ping.registration)
        peer = self.peers.get(ping.decode)
        is_known = peer is not None and self._registrations.is_current(meant, routing_id)
        if peer is not None and is_known:
            peer.heartbeat.heard(self._clock())
        self._socket.send(routing_id, Pong(self.manifest.incarnation, ping.registration, is_known))

    def _on_peer_message(self, routing_id: bytes, message: PeerMessage) -> None:
        """What belongs to no current registration is dropped.

        Nobody waits for an answer to it: a decode node that still believes in that registration is corrected by its
        next ``Pong``.
        """
        peer = self.peers.get(message.decode)
        if peer is None or not self._registrations.covers(message, routing_id):
            self._metrics.dropped("stale")
        elif not isinstance(message, FromDecode):
            self._metrics.dropped("direction")
        else:
            peer.heartbeat.heard(self._clock())
            self._manager.on_message(peer, message)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for peer in list(self.peers.values()):
                if peer.heartbeat.tick(now, TICK_S):
                    silent_s = peer.heartbeat.silent_for(now)
                    self.lose(peer, Failure("peer_lost", f"{peer} was silent for {silent_s:.1f} s"))

    def lose(self, peer: DecodePeer, failure: Failure) -> None:
        """The registration of ``peer`` is over."""
        log.warning("lost a peer: %s", failure.reason)
        peer.lost = True
        self._registrations.end(peer.registration)
        self.peers.pop(peer.incarnation, None)
        try:
            self._manager.on_lost(peer, failure)
        except Exception:
            log.exception("losing %s could not be handled", peer)
