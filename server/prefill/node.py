"""The prefill node: rooms come in over the bootstrap socket, prompts go through the engine, state goes out.

A room's way: ``Reserve`` -> queue -> slot, pages, engine -> pages pushed after each chunk -> tail pushed after the last
-> ``Done`` -> ``Committed`` -> scrubbed -> released (:mod:`.room_manager`). This file is the process around it: start,
stop, health.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass
from typing import Any

from server.engine.events import Died, Event
from server.engine.request import Generation, GenerationRequest
from server.failure import Failure, RequestFailed
from server.faults.messages import Outbox
from server.node.context import NodeContext, NodeSettings, common_info, load_of
from server.node.supervisor import Supervisor
from server.node.ticker import tick_for_ever
from server.prefill.bootstrap import Bootstrap
from server.prefill.bootstrap_socket import BootstrapSocket
from server.prefill.room_manager import PrefillRoomManager
from server.threads import call_in_thread
from server.transfer.addresses import join_address
from server.transfer.manifest import TransportIdentity, build_manifest, new_incarnation

_KNOWN_S = 2.0
"""For the decode nodes to answer that they know of this node's end."""
_LOOK_S = 0.02
_SHUTTING_DOWN = Failure("shutting_down", "the prefill node is shutting down")


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


class PrefillNode:
    """Lives in one event loop; only :meth:`on_engine_event` may be called from another thread.

    The caller starts the engine after :meth:`start` and stops it after :meth:`stop`.
    """

    role = "prefill"

    def __init__(self, settings: PrefillSettings, context: NodeContext) -> None:
        self.model_name = settings.model_name
        self.max_context = settings.max_context
        self.tokenizer = context.tokenizer
        self.sampling_defaults = context.sampling_defaults
        self.incarnation = new_incarnation()
        self._settings = settings
        self._context = context
        self._socket: BootstrapSocket | None = None
        self._bootstrap: Bootstrap | None = None
        self._manager: PrefillRoomManager | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._supervisor = Supervisor()

    @property
    def bootstrap_port(self) -> int:
        """The port that decode nodes connect to; 0 before :meth:`start`."""
        return self._socket.port if self._socket is not None else 0

    async def start(self) -> None:
        """Tries the transport and opens the bootstrap port. Raises what either raises."""
        self._loop = asyncio.get_running_loop()
        settings, context = self._settings, self._context
        transport = settings.transport
        if transport is None:
            transport = await call_in_thread("try transport", TransportIdentity.of_new, context.make_transport)
        manifest = build_manifest(
            "prefill",
            self.incarnation,
            context.identity,
            transport,
            context.arena.layout,
            context.arena.ptr,
            spec_tokens=settings.spec_tokens,
            components=context.arena.layout.names,
        )
        self._manager = manager = PrefillRoomManager(settings, context)
        context.metrics.watch(
            context.allocator,
            queued=lambda: manager.n_waiting,
            running=lambda: len(manager.reqs) - manager.n_waiting,
            peers=lambda: len(manager.senders),
        )
        self._socket = socket = BootstrapSocket(
            settings.guard, context.metrics, settings.deadlines.register_s, Outbox(context.faults)
        )
        self._bootstrap = bootstrap = Bootstrap(
            manifest, manager, socket, settings.deadlines, context.metrics, clock=context.clock
        )
        await socket.start(bootstrap, settings.bootstrap_host, settings.bootstrap_port, settings.bootstrap_listener)
        bootstrap.start()
        manager.routed_rooms.address = join_address(settings.bootstrap_host, socket.port)
        self._ticker = ticker = asyncio.create_task(tick_for_ever(self.role, manager), name="prefill ticker")
        self._supervisor.watch(lambda: [ticker, *socket.tasks, *bootstrap.tasks, *manager.threads])

    @property
    def manager(self) -> PrefillRoomManager:
        """The node's rooms. Raises :class:`RuntimeError` before :meth:`start`."""
        if self._manager is None:
            raise RuntimeError("the prefill node is not running yet")
        return self._manager

    @property
    def bootstrap(self) -> Bootstrap:
        """Its registrations. Raises :class:`RuntimeError` before :meth:`start`."""
        if self._bootstrap is None:
            raise RuntimeError("the prefill node is not running yet")
        return self._bootstrap

    @property
    def socket(self) -> BootstrapSocket:
        """What decode nodes are connected to. Raises :class:`RuntimeError` before :meth:`start`."""
        if self._socket is None:
            raise RuntimeError("the prefill node is not running yet")
        return self._socket

    def vital(self, thread: threading.Thread) -> None:
        """The node is dead if ``thread`` is."""
        self._supervisor.watch(lambda: [thread])

    @property
    def busy(self) -> bool:
        """Whether a room is not over yet."""
        return self._manager is not None and bool(self._manager.reqs)

    def drain(self) -> None:
        """Takes no room any more and gives up those that wait; prompts and transfers under way go on."""
        if self._manager is not None:
            self._manager.drain(_SHUTTING_DOWN)

    async def stop(self) -> None:
        """Reports to every decode node that its rooms are over, then closes the senders and the bootstrap port.

        May be called more than once.
        """
        is_alive, reason = self.alive()
        self._supervisor.end()
        if self._manager is not None:
            self._manager.refuse_all(_SHUTTING_DOWN if is_alive else Failure("node_died", reason))
            await self._until_known(self._manager)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._manager is not None:
            await self._manager.close()
        if self._socket is not None:
            await self._socket.close()
        if self._bootstrap is not None:
            await self._bootstrap.close()

    async def _until_known(self, manager: PrefillRoomManager) -> None:
        """Keeps the connections open until every room's end is known, at most :data:`_KNOWN_S`.

        ZMQ drops what a decode node has received and not yet read when the connection breaks: it would take this node
        for one that fell silent. What is lost is sent again by the ticker.
        """
        give_up = self._context.clock() + _KNOWN_S
        while self._context.clock() < give_up and not all(req.room.is_known for req in manager.reqs.values()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    # --- Backend ------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Generation:
        """Takes a request whose room a router chose; the answer is its first token, when a decode node has the rest.

        Raises :class:`RequestFailed`.
        """
        if self._manager is None:
            raise RequestFailed(Failure("not_running", "the prefill node is not running yet"))
        return self._manager.submit(request)

    def load(self) -> dict[str, int]:
        manager = self._manager
        n_http = manager.routed_rooms.n_http if manager is not None else 0
        n_waiting, n_rooms = (manager.n_waiting, len(manager.reqs)) if manager is not None else (0, 0)
        return load_of(self._context, n_rooms + n_http, n_waiting + n_http)

    def alive(self) -> tuple[bool, str]:
        reason = self._supervisor.look()
        return not reason, reason

    async def ready(self) -> tuple[bool, str]:
        """Whether rooms are taken and the last probe write into every registered decode node arrived there.

        Decode nodes ask for the probes. Before one is registered, and before its first probe, it is ready.
        """
        is_alive, reason = self.alive()
        if not is_alive or self._manager is None:
            return False, reason or "the prefill node is not running"
        if self._manager.refusing is not None:
            return False, self._manager.refusing.reason
        passed, reason = self._manager.probes.ready(self._manager.senders)
        return passed, reason or "no decode node is registered yet"

    def server_info(self) -> dict[str, Any]:
        manager = self._manager
        peers = list(manager.senders) if manager is not None else []
        return common_info(self.role, self.incarnation, self._settings, self._context) | {
            "bootstrap_port": self.bootstrap_port,
            "waiting": manager.n_waiting if manager is not None else 0,
            "refused": self._bootstrap.refused() if self._bootstrap is not None else [],
            "unpaired": {"http": manager.routed_rooms.n_http, "rooms": manager.routed_rooms.n_decode}
            if manager is not None
            else {},
            "peers": [
                {
                    "incarnation": peer.incarnation,
                    "registration": peer.registration.number,
                    "session": peer.manifest.session,
                }
                for peer in peers
            ],
        }

    # --- events -------------------------------------------------------------------------------------------------------

    def on_engine_event(self, event: Event) -> None:
        """Takes an engine event from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_engine_event, event)

    def _on_engine_event(self, event: Event) -> None:
        if self._manager is None:
            return
        if isinstance(event, Died):
            reason = f"the engine thread has ended: {event.message}"
            self._supervisor.fail(reason)
            self._manager.engine_died(Failure("engine_died", reason))
        else:
            self._manager.on_engine_event(event)
