"""A decode process as the prefill node knows it, and the port through which messages reach it."""

from __future__ import annotations

from typing import Protocol

from server.cache.layout import ArenaLayout
from server.transfer.manifest import Manifest
from server.transfer.protocol import AnyMessage, Registration
from server.transfer.rooms import Heartbeat


class ControlSocket(Protocol):
    """The way out to decode nodes: :class:`~server.prefill.bootstrap_socket.BootstrapSocket`, or a simulated network.

    ``routing_id`` is the connection's. Called in the event loop; nothing here waits.
    """

    def send(self, routing_id: bytes, message: AnyMessage) -> None:
        """Queues a message; it is lost if the connection is.

        Raises :class:`~server.transfer.protocol.ProtocolError` for one over its cap.
        """

    def is_connected(self, routing_id: bytes) -> bool:
        """Whether a message has come over a connection of this peer that is still open."""


class DecodePeer:
    """One decode process in one of its registrations: a new transport session is a new peer."""

    def __init__(
        self,
        registration: Registration,
        manifest: Manifest,
        routing_id: bytes,
        heartbeat: Heartbeat,
        socket: ControlSocket,
    ) -> None:
        self.registration = registration
        self.manifest = manifest
        self.layout: ArenaLayout = manifest.layout()
        self.routing_id = routing_id
        self.heartbeat = heartbeat
        self.lost = False
        self._socket = socket

    @property
    def incarnation(self) -> str:
        return self.manifest.incarnation

    @property
    def name(self) -> str:
        """Short, for records and metrics."""
        return self.incarnation[:8]

    def send(self, message: AnyMessage) -> None:
        """Queues a message for the decode node; nothing is sent once the registration is over.

        Raises :class:`~server.transfer.protocol.ProtocolError` for one over its cap.
        """
        if not self.lost:
            self._socket.send(self.routing_id, message)

    def __str__(self) -> str:
        return f"decode {self.incarnation[:8]}/{self.registration.number} ({self.manifest.session})"
