"""The decode node: the :class:`~server.engine.request.Backend` that the HTTP API serves.

What happens to a request is in :mod:`.request_manager`. This file is the process around it: start, stop, health.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from typing import Any

from server.decode.request_manager import RequestManager
from server.decode.room_manager import DecodePorts, DecodeRoomManager
from server.decode.settings import DecodeSettings
from server.engine.events import Died, Event
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest
from server.failure import Failure
from server.node.context import NodeContext, common_info, load_of
from server.node.supervisor import Supervisor
from server.node.ticker import tick_for_ever
from server.transfer.manifest import new_incarnation

log = logging.getLogger(__name__)

_SHUTTING_DOWN = Failure("shutting_down", "the decode node is shutting down")


class DecodeNode:
    """Lives in one event loop; only :meth:`on_engine_event` may be called from another thread.

    The caller starts the engine after :meth:`start` and stops it after :meth:`stop`.
    """

    role = "decode"

    def __init__(self, settings: DecodeSettings, context: NodeContext, ports: DecodePorts | None = None) -> None:
        self.model_name = settings.model_name
        self.max_context = settings.max_context
        self.tokenizer = context.tokenizer
        self.sampling_defaults = context.sampling_defaults
        self.incarnation = new_incarnation()
        self._settings = settings
        self._context = context
        self.requests = RequestManager(settings, context, self.incarnation, ports)
        self._events: deque[Event] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._supervisor = Supervisor()

    async def start(self) -> None:
        """Connects to the prefill nodes (without waiting for them)."""
        self._loop = asyncio.get_running_loop()
        self.requests.start()
        self._ticker = ticker = asyncio.create_task(tick_for_ever(self.role, self.requests), name="decode ticker")
        self._supervisor.watch(lambda: [ticker, *self.rooms.peers.tasks])

    def vital(self, thread: threading.Thread) -> None:
        """The node is dead if ``thread`` is."""
        self._supervisor.watch(lambda: [thread])

    @property
    def rooms(self) -> DecodeRoomManager:
        """The rooms and peers of the requests."""
        return self.requests.rooms

    @property
    def busy(self) -> bool:
        """Whether a client still waits for an answer."""
        return any(not req.generation.ended for req in self.requests.reqs.values())

    def drain(self) -> None:
        """Takes nothing new and opens no room any more; what is in a room or decoding goes on."""
        self.requests.drain(_SHUTTING_DOWN)

    async def stop(self) -> None:
        """Fails what is left with 503, tells the prefill nodes, and closes every connection and transport session.

        May be called more than once.
        """
        is_alive, reason = self.alive()
        self._supervisor.end()
        self.requests.refuse_all(_SHUTTING_DOWN if is_alive else Failure("node_died", reason))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self.requests.close()

    # --- Backend ------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, room: int | None = None) -> NodeGeneration:
        """Admits a request; ``room`` None draws one.

        Raises :class:`RequestFailed` at once for what cannot be served.
        """
        return self.requests.submit(request, room=room)

    def alive(self) -> tuple[bool, str]:
        reason = self._supervisor.look()
        return not reason, reason

    async def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now: with peers, whether a probe write by one of them really arrives."""
        is_alive, reason = self.alive()
        if not is_alive:
            return False, reason
        return await self.requests.ready()

    def load(self) -> dict[str, int]:
        return load_of(self._context, len(self.requests.reqs), len(self.requests.queue))

    def server_info(self) -> dict[str, Any]:
        return common_info(self.role, self.incarnation, self._settings, self._context) | {
            "local_prefill": self._settings.prefill is None,
            "spec_tokens": self._settings.spec_tokens,
            "draft_state": self._settings.draft_state,
            "waiting": len(self.requests.queue),
            "quarantine": self.requests.quarantine.describe(self._context.clock()),
            "peers": self.rooms.peers.describe(),
        }

    # --- events -------------------------------------------------------------------------------------------------------

    def on_engine_event(self, event: Event) -> None:
        """Takes an engine event from any thread. The events of one step wake the event loop once."""
        self._events.append(event)
        if self._loop is not None and not self._loop.is_closed() and len(self._events) == 1:
            self._loop.call_soon_threadsafe(self._take_engine_events)

    def _take_engine_events(self) -> None:
        while self._events:
            event = self._events[0]
            try:
                self._on_engine_event(event)
            except Exception:
                log.exception("the decode node failed on %s", type(event).__name__)
            self._events.popleft()

    def _on_engine_event(self, event: Event) -> None:
        if isinstance(event, Died):
            reason = f"the engine thread has ended: {event.message}"
            self._supervisor.fail(reason)
            self.requests.engine_died(Failure("engine_died", reason))
        else:
            self.requests.on_engine_event(event)
