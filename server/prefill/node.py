"""The prefill node: rooms come in over the bootstrap socket, prompts go through the engine, state goes out.

A room's way: ``Reserve`` -> queue -> slot, pages, engine -> pages pushed after each chunk -> tail pushed after the last
-> ``Done`` -> ``Committed`` -> scrubbed -> released (:mod:`.room_manager`). The process around it is in
:mod:`server.node.base`.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest
from server.node.base import BaseNode
from server.node.context import NodeContext, NodeSettings
from server.prefill.bootstrap import Bootstrap
from server.prefill.bootstrap_socket import BootstrapSocket
from server.prefill.room_manager import PrefillRoomManager
from server.threads import call_in_thread
from server.transfer.addresses import join_address
from server.transfer.manifest import TransportIdentity, build_manifest

_KNOWN_S = 2.0
"""For the decode nodes to answer that they know of this node's end."""
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(NodeSettings):
    """How a prefill node is set up. ``bootstrap_port`` 0 takes a free port; ``spec_tokens`` only sizes the rings.

    ``bootstrap_listener`` listens on that port already, and ``transport`` is known already, where a launcher has seen
    to it.
    """

    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: int = 8998
    bootstrap_listener: socket.socket | None = None
    transport: TransportIdentity | None = None


class PrefillNode(BaseNode):
    """Computes prompts and pushes their state to decode nodes. It is built in the event loop that it lives in.

    ``manager`` has its rooms, ``bootstrap`` its registrations (from :meth:`start` on), ``socket`` its connections.
    """

    role = "prefill"
    manager: PrefillRoomManager
    bootstrap: Bootstrap | None = None

    def __init__(self, settings: PrefillSettings, context: NodeContext) -> None:
        super().__init__(settings, context)
        self._settings = settings
        self.manager = manager = PrefillRoomManager(settings, context)
        self.socket = BootstrapSocket(settings.guard, context.metrics, settings.deadlines.register_s, context.hooks)
        context.metrics.watch(
            context.allocator,
            queued=lambda: manager.n_waiting,
            running=lambda: len(manager.reqs) - manager.n_waiting,
            peers=lambda: len(manager.senders),
        )

    @property
    def bootstrap_port(self) -> int:
        """The port that decode nodes connect to; 0 before :meth:`start`."""
        return self.socket.port

    async def _open(self) -> None:
        """Tries the transport and opens the bootstrap port. Raises what either raises."""
        settings, context, layout = self._settings, self._context, self._context.arena.layout
        transport = settings.transport
        if transport is None:
            transport = await call_in_thread("try transport", TransportIdentity.of_new, context.make_transport)
        manifest = build_manifest(
            "prefill",
            self.incarnation,
            context.identity,
            transport,
            layout,
            context.arena.ptr,
            spec_tokens=settings.spec_tokens,
            components=layout.names,
        )
        self.bootstrap = bootstrap = Bootstrap(
            manifest, self.manager, self.socket, settings.deadlines, context.metrics, clock=context.clock
        )
        await self.socket.start(
            bootstrap, settings.bootstrap_host, settings.bootstrap_port, settings.bootstrap_listener
        )
        bootstrap.start()
        self.manager.routed_rooms.address = join_address(settings.bootstrap_host, self.socket.port)
        self._supervisor.watch(lambda: [*self.socket.tasks, *bootstrap.tasks, *self.manager.senders.threads])

    async def _inform_peers(self) -> None:
        """Keeps the connections open until every room's end is known, at most :data:`_KNOWN_S`.

        ZMQ drops what a decode node has received and not yet read when the connection breaks: it would take this node
        for one that fell silent. What is lost is sent again by the ticker.
        """
        clock, reqs = self._context.clock, self.manager.reqs
        give_up = clock() + _KNOWN_S
        while clock() < give_up and not all(req.room.acknowledged for req in reqs.values()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def _close(self) -> None:
        await self.manager.close()
        await self.socket.close()
        if self.bootstrap is not None:
            await self.bootstrap.close()

    @property
    def busy(self) -> bool:
        """Whether a room is not over yet."""
        return bool(self.manager.reqs)

    def submit(self, request: GenerationRequest) -> NodeGeneration:
        """Takes a request whose room a router chose; the answer is its first token, when a decode node has the rest.

        Raises :class:`RequestFailed`.
        """
        return self.manager.submit(request)

    async def _ready(self) -> tuple[bool, str]:
        """Whether rooms are taken and the last probe write into every registered decode node arrived there.

        Decode nodes ask for the probes. Before one is registered, and before its first probe, it is ready.
        """
        if self.manager.refusing is not None:
            return False, self.manager.refusing.reason
        passed, reason = self.manager.probes.ready(self.manager.senders)
        return passed, reason or "no decode node is registered yet"

    def _counts(self) -> tuple[int, int]:
        n_http = self.manager.routed_rooms.n_http
        return len(self.manager.reqs) + n_http, self.manager.n_waiting + n_http

    def _info(self) -> dict[str, Any]:
        manager = self.manager
        return {
            "bootstrap_port": self.bootstrap_port,
            "waiting": manager.n_waiting,
            "refused": self.bootstrap.refused() if self.bootstrap is not None else [],
            "unpaired": {"http": manager.routed_rooms.n_http, "rooms": manager.routed_rooms.n_decode},
            "peers": [
                {
                    "incarnation": peer.incarnation,
                    "registration": peer.registration.number,
                    "session": peer.manifest.session,
                }
                for peer in manager.senders
            ],
        }
