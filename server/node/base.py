"""What both roles' nodes are: the process around a manager. Start, drain, stop, health, and the engine's events."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Protocol

from server.engine.events import Died, Event
from server.engine.request import Generation, GenerationRequest
from server.failure import Failure
from server.node.context import NodeContext, NodeSettings
from server.node.supervisor import Supervisor
from server.telemetry.latency import RequestMetrics
from server.telemetry.record import RoomList, RoomRecord
from server.telemetry.rooms import RoomRecords
from server.telemetry.state import memory_state
from server.threads import call_in_thread
from server.transfer.manifest import new_incarnation

log = logging.getLogger(__name__)

TICK_S = 0.1
STATE_S = 0.25


class Manager(Protocol):
    """What a node keeps its requests or rooms in: the two roles' managers have this in common."""

    records: RoomRecords
    request_metrics: RequestMetrics

    def tick(self) -> None: ...
    def on_engine_event(self, event: Event) -> None: ...
    def engine_died(self, failure: Failure) -> None: ...
    def drain(self, failure: Failure) -> None: ...
    def refuse_all(self, failure: Failure) -> None: ...


class BaseNode(ABC):
    """Lives in one event loop; only :meth:`on_engine_event` may be called from another thread.

    The caller starts the engine before :meth:`start` and stops it after :meth:`stop`. It is the
    :class:`~server.engine.request.Backend` that the HTTP API serves.
    """

    role: str
    manager: Manager

    def __init__(self, settings: NodeSettings, context: NodeContext) -> None:
        self.model_name = settings.model_name
        self.max_context = settings.max_context
        self.tokenizer = context.tokenizer
        self.sampling_defaults = context.sampling_defaults
        self.metrics = context.metrics
        self.metrics.expect(self.role, context.arena.layout.names)
        self.incarnation = new_incarnation()
        self._context = context
        self._guard_rule, self._facts = settings.guard.rule, settings.facts
        self._shutting_down = Failure("shutting_down", f"the {self.role} node is shutting down")
        self._events: deque[Event] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._supervisor = Supervisor()
        self._state: dict[str, Any] = {}
        self._state_until = float("-inf")

    # --- what a role adds -----------------------------------------------------------------------------------------

    @abstractmethod
    async def _open(self) -> None:
        """Opens the connections of the node, and has the supervisor watch what it cannot live without.

        Raises what keeps the node from starting.
        """

    async def _inform_peers(self) -> None:  # noqa: B027  (a role may have nothing to add)
        """After everything was given up: waits, for a limited time, until the peers know."""

    @abstractmethod
    async def _close(self) -> None:
        """Closes every connection and transport session; also after a start that failed."""

    @abstractmethod
    async def _ready(self) -> tuple[bool, str]:
        """Whether a request could be served now, and why; asked only while the node lives."""

    @abstractmethod
    def _info(self) -> dict[str, Any]:
        """What ``/server_info`` has of this role only."""

    def _role_state(self, _now: float) -> dict[str, Any]:
        """What ``/state`` has of this role only."""
        return {}

    @abstractmethod
    def _counts(self) -> tuple[int, int]:
        """Requests under way, and those of them that wait."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether something is under way."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> Generation:
        """Admits a request. Raises :class:`RequestFailed` at once for what cannot be served."""

    # --- start and end --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens the node's connections; a decode node does not wait for its peers."""
        self._loop = asyncio.get_running_loop()
        if self._context.traces is not None:
            self._context.traces.start()
        await self._open()
        self._ticker = ticker = asyncio.create_task(self._tick_for_ever(), name=f"{self.role} ticker")
        self._supervisor.watch(lambda: [ticker])
        self._loop.call_soon(self._take_engine_events)  # those of before

    def vital(self, thread: threading.Thread) -> None:
        """The node is dead if ``thread`` is."""
        self._supervisor.watch(lambda: [thread])

    def drain(self) -> None:
        """Takes nothing new, and refuses by name what has not begun; what is under way goes on."""
        self.manager.drain(self._shutting_down)

    async def stop(self) -> None:
        """Fails what is left, informs the peers, and closes every connection. May be called more than once."""
        is_alive, reason = self.alive()
        self._supervisor.end()
        self.manager.refuse_all(self._shutting_down if is_alive else Failure("node_died", reason))
        await self._inform_peers()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._close()
        if self._context.traces is not None:
            await call_in_thread("close traces", self._context.traces.close)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.manager.tick()
            except Exception:
                log.exception("a tick of the %s node failed", self.role)

    # --- health and information -----------------------------------------------------------------------------------

    def alive(self) -> tuple[bool, str]:
        reason = self._supervisor.look()
        return not reason, reason

    async def ready(self) -> tuple[bool, str]:
        is_alive, reason = self.alive()
        return await self._ready() if is_alive else (False, reason)

    def server_info(self) -> dict[str, Any]:
        context = self._context
        return {
            "disaggregation_mode": self.role,
            "served_model_name": self.model_name,
            "max_context": self.max_context,
            "incarnation": self.incarnation,
            "model_fingerprint": context.identity.model,
            "tokenizer_fingerprint": context.identity.tokenizer,
            "dtype": context.identity.dtype,
            "numerics": context.identity.numerics,
            "kernels": context.identity.kernels,
            "deterministic": context.identity.deterministic,
            "page_size": context.arena.layout.page_size,
            **self._facts,
            "weights": dict(context.weights()),
            "control_plane_takes": self._guard_rule,
            "faults": context.hooks.describe(),
            "allocator": (counts := context.allocator.counts()),
            "max_running_requests": sum(counts["slots"].values()),
        } | self._info()

    def rooms(self, limit: int) -> RoomList:
        return self.manager.records.listing(limit)

    def room(self, room: int) -> RoomRecord | None:
        return self.manager.records.find(room)

    def state(self) -> dict[str, Any]:
        """What ``/state`` answers, made anew every :data:`STATE_S` seconds at most: a page asks again and again."""
        now = self._context.clock()
        if now >= self._state_until:
            n_requests, n_waiting = self._counts()
            manager, metrics = self.manager, self.metrics
            self._state_until = now + STATE_S
            self._state = {
                "node": self.role,
                "unix_us": round(1e6 * time.time()),
                **memory_state(self._context.allocator),
                "requests": {"running": n_requests - n_waiting, "waiting": n_waiting},
                **metrics.moved(),
                **manager.request_metrics.totals(),
                "accept_lengths": {},
                "quarantine": [],
            } | self._role_state(now)
        return self._state

    def load(self) -> dict[str, int]:
        """As :meth:`.Backend.load` says: the tokens are those that pages are for."""
        n_requests, n_waiting = self._counts()
        counts, page_size = self._context.allocator.counts(), self._context.arena.layout.page_size
        n_pages = sum(counts["pages"].values())
        return {
            "num_reqs": n_requests,
            "num_waiting_reqs": n_waiting,
            "num_tokens": (n_pages - counts["pages"]["free"]) * page_size,
            "max_total_num_tokens": n_pages * page_size,
            "max_running_requests": sum(counts["slots"].values()),
        }

    def flush_cache(self) -> int:
        """As :meth:`.Backend.flush_cache` says."""
        cache = self._context.prefix_cache
        n_pages = 0 if cache is None else cache.flush()
        log.info("prefix cache: flushed %d pages", n_pages)
        return n_pages

    # --- the engine's events --------------------------------------------------------------------------------------

    def on_engine_event(self, event: Event) -> None:
        """Takes an engine event from any thread. The events of one step wake the event loop once."""
        self._events.append(event)
        if self._loop is not None and not self._loop.is_closed() and len(self._events) == 1:
            self._loop.call_soon_threadsafe(self._take_engine_events)

    def _take_engine_events(self) -> None:
        while self._events:
            event = self._events[0]
            try:
                if isinstance(event, Died):
                    self._on_engine_died(event)
                else:
                    self.manager.on_engine_event(event)
            except Exception:
                log.exception("the %s node failed on %s", self.role, type(event).__name__)
            self._events.popleft()

    def _on_engine_died(self, event: Died) -> None:
        reason = f"the engine thread has ended: {event.message}"
        self._supervisor.fail(reason)
        self.manager.engine_died(Failure("engine_died", reason))
