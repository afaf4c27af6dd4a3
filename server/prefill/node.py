"""The prefill node: rooms come in over the bootstrap socket, prompts go through the engine, state goes out.

A room's way: ``Reserve`` -> queue -> slot, pages, engine -> pages pushed after each chunk -> tail pushed after the last
-> ``Done`` -> ``Committed`` -> scrubbed -> released (:mod:`.room_manager`). This file is the process around it: start,
stop, health.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from server.engine.events import Died, Event
from server.engine.request import Generation, GenerationRequest
from server.failure import Failure, RequestFailed
from server.faults.messages import Outbox
from server.node.context import NodeContext, NodeSettings, common_info, load_of
from server.node.supervisor import Supervisor
from server.node.ticker import tick_for_ever
from server.prefill.bootstrap import Bootstrap, DecodePeer
from server.prefill.reception import Reception
from server.prefill.room_manager import PrefillRoomManager
from server.threads import call_in_thread
from server.transfer.addresses import join_address
from server.transfer.manifest import TransportIdentity, build_manifest, new_incarnation
from server.transfer.protocol import AnyMessage

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

    def __init__(self, settings: PrefillSettings, parts: NodeContext) -> None:
        self.model_name = settings.model_name
        self.max_context = settings.max_context
        self.tokenizer = parts.tokenizer
        self.sampling_defaults = parts.sampling_defaults
        self.incarnation = new_incarnation()
        self._settings = settings
        self._parts = parts
        self._bootstrap: Bootstrap | None = None
        self._manager: PrefillRoomManager | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._supervisor = Supervisor()

    @property
    def bootstrap_port(self) -> int:
        """The port that decode nodes connect to; 0 before :meth:`start`."""
        return self._bootstrap.port if self._bootstrap is not None else 0

    async def start(self) -> None:
        """Tries the transport and opens the bootstrap port. Raises what either raises."""
        self._loop = asyncio.get_running_loop()
        parts, layout = self._parts, self._parts.arena.layout
        transport = self._settings.transport
        if transport is None:
            transport = await call_in_thread("try transport", TransportIdentity.of_new, parts.make_transport)
        manifest = build_manifest(
            "prefill",
            self.incarnation,
            parts.identity,
            transport,
            layout,
            parts.arena.ptr,
            spec_tokens=self._settings.spec_tokens,
            components=layout.names,
        )
        manager = PrefillRoomManager(self._settings, parts, self._send)
        parts.metrics.watch(
            parts.allocator,
            queued=lambda: manager.n_waiting,
            running=lambda: len(manager.works) - manager.n_waiting,
            peers=lambda: len(manager.targets),
        )
        self._manager = manager
        self._bootstrap = bootstrap = Bootstrap(
            manifest,
            Reception(manager, self._settings, parts, self._send),
            self._settings.deadlines,
            parts.metrics,
            self._settings.guard,
            Outbox(parts.faults),
        )
        settings = self._settings
        await bootstrap.start(settings.bootstrap_host, settings.bootstrap_port, settings.bootstrap_listener)
        manager.routed_rooms.address = join_address(settings.bootstrap_host, bootstrap.port)
        self._ticker = ticker = asyncio.create_task(tick_for_ever(self.role, manager), name="prefill ticker")
        self._supervisor.watch(lambda: [ticker, *bootstrap.tasks, *manager.threads])

    def vital(self, thread: threading.Thread) -> None:
        """The node is dead if ``thread`` is."""
        self._supervisor.watch(lambda: [thread])

    @property
    def busy(self) -> bool:
        """Whether a room is not over yet."""
        return self._manager is not None and bool(self._manager.works)

    def drain(self) -> None:
        """Takes no room any more and gives up those that wait; prompts and transfers under way go on."""
        if self._manager is not None:
            self._manager.drain(_SHUTTING_DOWN)

    async def stop(self) -> None:
        """Tells every decode node that its rooms are over, then closes the senders and the bootstrap port.

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
        if self._bootstrap is not None:
            await self._bootstrap.close()

    async def _until_known(self, manager: PrefillRoomManager) -> None:
        """Keeps the connections open until every room's end is known, at most :data:`_KNOWN_S`.

        ZMQ drops what a decode node has received and not yet read when the connection breaks: it would take this node
        for one that fell silent. What is lost is sent again by the ticker.
        """
        give_up = time.monotonic() + _KNOWN_S
        while time.monotonic() < give_up and not all(work.room.is_known for work in manager.works.values()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    # --- Backend ------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Generation:
        """Takes a request whose room a router named; the answer is its first token, when a decode node has the rest.

        Raises :class:`RequestFailed`.
        """
        if self._manager is None:
            raise RequestFailed(Failure("not_running", "the prefill node is not running yet"))
        return self._manager.submit(request)

    def load(self) -> dict[str, int]:
        manager = self._manager
        n_http = manager.routed_rooms.n_http if manager is not None else 0
        n_waiting, n_rooms = (manager.n_waiting, len(manager.works)) if manager is not None else (0, 0)
        return load_of(self._parts, n_rooms + n_http, n_waiting + n_http)

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
        targets = self._manager.targets.values()
        passed = not any(target.probe is not None and target.probe[1] for target in targets)
        return passed, "; ".join(target.describe_probe() for target in targets) or "no decode node is registered yet"

    def server_info(self) -> dict[str, Any]:
        manager = self._manager
        targets = list(manager.targets) if manager is not None else []
        return common_info(self.role, self.incarnation, self._settings, self._parts) | {
            "bootstrap_port": self.bootstrap_port,
            "waiting": manager.n_waiting if manager is not None else 0,
            "refused": self._bootstrap.refused() if self._bootstrap is not None else [],
            "unpaired": {"http": manager.routed_rooms.n_http, "rooms": manager.routed_rooms.n_lonely}
            if manager is not None
            else {},
            "peers": [
                {
                    "incarnation": peer.incarnation,
                    "registration": peer.registration.number,
                    "session": peer.manifest.session,
                }
                for peer in targets
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

    def _send(self, peer: DecodePeer, message: AnyMessage) -> None:
        if self._bootstrap is not None:
            self._bootstrap.send(peer, message)
