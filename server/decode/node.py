"""The decode node: the :class:`~server.engine.request.Backend` that the HTTP API serves.

A request's way: ``submit`` checks it and queues it -> ``_admit`` gives it a slot and pages and opens a room with a
prefill node (:mod:`.receiver`) -> ``room_committed`` hands it to the engine -> engine events fill its stream -> its
memory is released.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.cache.allocator import Allocator, ItemState
from server.cache.arena import Arena
from server.cache.specs import DRAFT
from server.decode.admission import check_request, tokens_held, wire_request, with_seed
from server.decode.draft_metrics import DraftMetrics
from server.decode.generation import NodeGeneration
from server.decode.receiver import Receiver, Work, request_failed
from server.decode.sessions import TransportSessions
from server.engine.events import (
    Cancel,
    Command,
    Died,
    Event,
    Failed,
    Finished,
    Generate,
    Output,
    Resume,
    Scrub,
    Scrubbed,
)
from server.engine.request import (
    FinishReason,
    GenerationRequest,
    RequestFailed,
    RouteInfo,
    SamplingParams,
    TokenizerLike,
    TokenLogprob,
    TokenOutput,
)
from server.transfer.engines.base import TransferEngine
from server.transfer.faults import FaultSet
from server.transfer.manifest import ModelIdentity, new_incarnation
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import MAX_ROOM, Done
from server.transfer.rooms import Deadlines, Failure, RoomKey

log = logging.getLogger(__name__)

_TICK_S = 0.1


@dataclass(frozen=True)
class DecodeSettings:
    """How a decode node is set up.

    ``prefill`` are the prefill nodes' ``host:bootstrap_port``; None computes prompts here (``--local-prefill``).
    ``max_context`` and ``spec_tokens`` are in tokens. ``own_components`` are filled here and not asked of the peers.
    ``facts`` about the model are shown in ``/server_info``.
    """

    model_name: str
    max_context: int
    prefill: tuple[str, ...] | None
    spec_tokens: int = 0
    own_components: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)


class DecodeNode:
    """Lives in one event loop; only :meth:`on_engine_event` may be called from another thread.

    ``submit_command`` is the engine's inbox and ``make_transport`` builds one transport endpoint (one per peer; the
    node registers the arena with it). The caller starts the engine after :meth:`start` and stops it after :meth:`stop`.
    """

    role = "decode"

    def __init__(
        self,
        settings: DecodeSettings,
        *,
        submit_command: Callable[[Command], None],
        make_transport: Callable[[], TransferEngine],
        arena: Arena,
        allocator: Allocator,
        identity: ModelIdentity,
        tokenizer: TokenizerLike,
        sampling_defaults: SamplingParams,
        metrics: NodeMetrics,
        faults: FaultSet | None = None,
    ) -> None:
        if settings.prefill is not None and not settings.prefill:
            raise ValueError("a decode node needs at least one prefill node, or local prefill")
        self.model_name = settings.model_name
        self.max_context = settings.max_context
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults
        self.incarnation = new_incarnation()
        self._settings = settings
        self._submit_command = submit_command
        self._make_transport = make_transport
        self._arena = arena
        self._allocator = allocator
        self._identity = identity
        self._metrics = metrics
        self._faults = faults or FaultSet()
        self._draft_metrics: DraftMetrics | None = None
        if self.draft_state is not None:
            self._draft_metrics = DraftMetrics(metrics.registry, settings.spec_tokens, self.draft_state)
        self._receiver: Receiver | None = None
        self._waiting: deque[Work] = deque()
        self._events: deque[Event] = deque()
        self._works: dict[RoomKey, Work] = {}
        self._rooms: set[int] = set()
        self._epochs = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._alive = time.monotonic()
        self._died: str | None = None
        self._stopping = False

    @property
    def draft_state(self) -> str | None:
        """Where the draft's window of a prompt comes from; None without speculation."""
        if not self._settings.spec_tokens:
            return None
        if self._settings.prefill is None:
            return "local"
        return "recompute" if DRAFT in self._settings.own_components else "transfer"

    async def start(self) -> None:
        """Connects to the prefill nodes (without waiting for them)."""
        self._loop = asyncio.get_running_loop()
        self._metrics.watch(
            self._allocator,
            queued=lambda: len(self._waiting),
            running=lambda: len(self._works) - len(self._waiting),
            peers=lambda: sum(link.registered for link in self._receiver.links) if self._receiver else 0,
        )
        if self._settings.prefill is not None:
            self._receiver = Receiver(
                self,
                self._arena,
                self.incarnation,
                self._identity,
                self._settings.spec_tokens,
                tuple(name for name in self._arena.layout.names if name not in self._settings.own_components),
                self._settings.prefill,
                TransportSessions(self._make_transport, self._arena),
                self._settings.deadlines,
                self._metrics,
                self._faults,
            )
            self._receiver.start()
        self._ticker = asyncio.create_task(self._tick_for_ever(), name="decode ticker")

    async def stop(self) -> None:
        """Fails what is left with 503, tells the prefill nodes, and closes every connection and transport session."""
        self._stopping = True
        failure = Failure("shutting_down", "the decode node is shutting down", 503)
        for work in list(self._works.values()):
            self._drop(work, failure)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._receiver is not None:
            await self._receiver.close()

    # --- Backend ------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, room: int | None = None) -> NodeGeneration:
        """Admits a request; ``room`` None draws one.

        Raises :class:`RequestFailed` at once for what cannot be served.
        """
        self._check_serving()
        check_request(
            request,
            max_context=self.max_context,
            vocab_size=self.tokenizer.vocab_size,
            spec_tokens=self._settings.spec_tokens,
            allocator=self._allocator,
        )
        wire_request(request)
        if room is None:
            room = secrets.randbits(63)
        if not 0 <= room <= MAX_ROOM:
            raise RequestFailed("bad_room", f"room {room} is not in 0 .. {MAX_ROOM}", status=400)
        if room in self._rooms:
            raise RequestFailed("duplicate_room", f"room {room} is in use by another request", status=409)
        key = RoomKey(room, next(self._epochs), self.incarnation)
        work = Work(key, with_seed(request), NodeGeneration(lambda: self._abort(key)), time.monotonic())
        self._works[key] = work
        self._rooms.add(room)
        self._waiting.append(work)
        self._admit()
        return work.generation

    def alive(self) -> tuple[bool, str]:
        return (self._died is None, self._died or "")

    async def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now: with peers, whether a probe write by one of them really arrives."""
        try:
            self._check_serving()
        except RequestFailed as failure:
            return False, failure.message
        return (True, "local prefill") if self._receiver is None else await self._receiver.ready()

    def server_info(self) -> dict[str, Any]:
        return {
            "disaggregation_mode": self.role,
            "served_model_name": self.model_name,
            "max_context": self.max_context,
            "incarnation": self.incarnation,
            "local_prefill": self._receiver is None,
            "model_fingerprint": self._identity.model,
            "tokenizer_fingerprint": self._identity.tokenizer,
            "dtype": self._identity.dtype,
            "page_size": self._arena.layout.page_size,
            "spec_tokens": self._settings.spec_tokens,
            "draft_state": self.draft_state,
            **self._settings.facts,
            "waiting": len(self._waiting),
            "faults": [str(fault) for fault in self._faults.faults],
            "allocator": self._allocator.counts(),
            "peers": self._receiver.describe_peers() if self._receiver is not None else [],
        }

    # --- admission ----------------------------------------------------------------------------------------------------

    def _check_serving(self) -> None:
        if self._died is not None:
            raise RequestFailed("engine_died", f"the engine thread has ended: {self._died}", status=503)
        if self._stopping:
            raise RequestFailed("shutting_down", "the decode node is shutting down", status=503)
        if self._receiver is not None and not self._receiver.has_peer():
            raise RequestFailed("no_prefill", self._receiver.why_no_peer(), status=503)

    def _admit(self) -> None:
        """Gives the head of the queue a slot and pages, again and again while there are any."""
        while self._waiting and not self._stopping:
            work = self._waiting[0]
            link = self._receiver.pick() if self._receiver is not None else None
            if self._receiver is not None and link is None:
                return
            placement = self._allocator.reserve(work.key, tokens_held(work.request, self._settings.spec_tokens))
            if placement is None:
                return
            self._waiting.popleft()
            self._alive = time.monotonic()
            self._metrics.phase("admission", self._alive - work.enqueued)
            work.placement = placement
            if self._receiver is not None and link is not None:
                self._receiver.open(work, placement, link)
            else:
                self._allocator.commit(work.key)
                self._submit_command(Generate(work.key, work.request, placement))

    def _fail_waiting(self, failures: Iterator[tuple[Work, Failure]]) -> None:
        for work, failure in list(failures):
            self._waiting.remove(work)
            work.generation.fail(request_failed(failure))
            self._metrics.room_ended("failed", failure.code)
            self._forget(work)

    def _forget(self, work: Work) -> None:
        self._works.pop(work.key, None)
        self._rooms.discard(work.key.room)

    def _abort(self, key: RoomKey) -> None:
        work = self._works.get(key)
        if work is not None:
            self._drop(work, Failure("aborted", "the client aborted the request", 499))

    def _drop(self, work: Work, failure: Failure) -> None:
        """Ends a request wherever it is: in the queue, in its room, or in the engine."""
        if work in self._waiting:
            self._waiting.remove(work)
            self._end_generation(work, failure)
            self._forget(work)
        elif work.room is not None and work.room.active and self._receiver is not None:
            self._receiver.give_up(work, failure)
        elif not work.generation.ended:
            self._submit_command(Cancel(work.key))
            if failure.code != "aborted":
                work.generation.fail(request_failed(failure))

    def _end_generation(self, work: Work, failure: Failure) -> None:
        if failure.code == "aborted":
            work.generation.finish(FinishReason.ABORT)
        else:
            work.generation.fail(request_failed(failure))

    # --- RoomOwner ----------------------------------------------------------------------------------------------------

    def room_committed(self, work: Work, done: Done, first: TokenLogprob) -> None:
        if work.placement is None or work.link is None:
            raise RuntimeError(f"{work.key} was committed without memory or peer")
        self._allocator.commit(work.key)
        nbytes = {sent.component: sent.nbytes for sent in done.sent}
        work.generation.set_route(RouteInfo(work.link.address, work.key.room, nbytes, self.draft_state))
        self._submit_command(Resume(work.key, work.request, work.placement, first))

    def room_failed(self, work: Work, failure: Failure) -> None:
        log.warning("%s (%s) failed: %s: %s", work.key, work.request.request_id, failure.code, failure.reason)
        self._allocator.quarantine(work.key)
        self._end_generation(work, failure)

    def room_free(self, work: Work) -> None:
        if work.placement is not None:
            self._submit_command(Scrub(work.key, work.placement))

    def peers_changed(self) -> None:
        self._fail_waiting_without_peer()
        self._admit()

    def _fail_waiting_without_peer(self) -> None:
        if self._receiver is not None and not self._receiver.has_peer():
            failure = Failure("no_prefill", self._receiver.why_no_peer(), 503)
            self._fail_waiting((work, failure) for work in self._waiting)

    # --- engine -------------------------------------------------------------------------------------------------------

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
        self._alive = time.monotonic()
        if isinstance(event, Died):
            self._on_died(event.message)
            return
        work = self._works.get(event.key) if isinstance(event.key, RoomKey) else None
        if work is None:
            return
        match event:
            case Output():
                work.generation.set_route(self._local_route())
                self._count_step(work, event.output)
                work.generation.put(event.output)
            case Finished():
                work.generation.set_route(self._local_route())
                work.generation.finish(event.reason)
                self._release(work)
            case Failed():
                work.generation.fail(RequestFailed(event.code, event.message, status=500))
                self._release(work)
            case Scrubbed():
                self._release(work)
            case _:
                pass

    def _local_route(self) -> RouteInfo:
        return RouteInfo("local", None, draft_state=self.draft_state)

    def _count_step(self, work: Work, output: TokenOutput) -> None:
        if self._draft_metrics is not None:
            self._draft_metrics.step(output, work.n_generated)
        work.n_generated += len(output.token_ids)

    def _release(self, work: Work) -> None:
        if self._allocator.state_of(work.key) is not ItemState.FREE:
            self._allocator.release(work.key)
        self._forget(work)
        self._admit()

    def _on_died(self, message: str) -> None:
        self._died = message
        for work in list(self._works.values()):
            work.generation.fail(RequestFailed("engine_died", f"the engine thread has ended: {message}", status=500))

    # --- time ---------------------------------------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._tick()
            except Exception:
                log.exception("a tick of the decode node failed")

    def _tick(self) -> None:
        if self._receiver is not None:
            self._receiver.tick()
            self._fail_waiting_without_peer()
        now, limit_s = time.monotonic(), self._settings.deadlines.admission_s
        reason = f"no slot and pages became free for {limit_s:g} s"
        self._fail_waiting(
            (work, Failure("overloaded", reason, 503))
            for work in self._waiting
            if now - max(self._alive, work.enqueued) > limit_s
        )
