"""The prefill node's rooms: drives the room state machines with messages, engine events, sender results and ticks.

What a room does next is decided by :mod:`server.prefill.room`; this file feeds it events and carries out its
actions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial

from server.engine.events import (
    Cancel,
    ChunkComputed,
    ComputeFailed,
    Event,
    Finished,
    PrefillFinished,
    Scrub,
    Scrubbed,
)
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest
from server.failure import Failure, RequestFailed, internal_error
from server.faults.sending import SendingFaults
from server.node.context import NodeContext, NodeSettings
from server.prefill.bootstrap import DecodePeer
from server.prefill.kv_sender import SendResult
from server.prefill.probe import PeerSender, ProbeKey, ProbeWriter
from server.prefill.request import Batch, PrefillRequest, end_of
from server.prefill.room import PrefillPhase, failed_message
from server.prefill.room_events import (
    Admitted,
    Advanced,
    BatchEnded,
    CancelEngine,
    CancelPush,
    Clean,
    Cleaned,
    Computed,
    EngineIdle,
    PrefillAction,
    PrefillEvent,
    PushPages,
    PushTail,
    QueueMoved,
    Release,
    SenderGone,
)
from server.prefill.room_memory import RoomMemory, placement_failure
from server.prefill.routed_rooms import RoutedRooms
from server.transfer.protocol import (
    AnyMessage,
    RequestArrived,
    Waiting,
    Writes,
    ids_of,
    registration_of,
)
from server.transfer.rooms import Forget, GivenUp, PeerLost, RoomKey, Send, Tick, Tombstones

log = logging.getLogger(__name__)

_SENDER_CLOSE_S = 5.0


class PrefillRoomManager:
    """All rooms of a prefill node, from ``Reserve`` to release. ``send`` posts a message to a decode node.

    Lives in the event loop of the node.
    """

    def __init__(
        self, settings: NodeSettings, parts: NodeContext, send: Callable[[DecodePeer, AnyMessage], None]
    ) -> None:
        self.targets: dict[DecodePeer, PeerSender] = {}
        self.works: dict[RoomKey, PrefillRequest] = {}
        self.queue: deque[PrefillRequest] = deque()
        self._arena = parts.arena
        self._submit_command = parts.submit_command
        self._faults = SendingFaults(parts.arena, parts.faults)
        self.memory = RoomMemory(settings, parts, self._faults)
        self._make_transport = self._faults.wrapping(parts.make_transport)
        self._send = send
        self._max_queue = settings.max_queue
        self._deadlines = settings.deadlines
        self._metrics = parts.metrics
        self.tombstones = Tombstones()
        self.probes = ProbeWriter(parts.arena, settings.deadlines.probe_s, send)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.refusing: Failure | None = None
        self.routed_rooms = RoutedRooms(
            self.step,
            self.enqueue,
            self._invite,
            self.refuse_waiting,
            parts.tokenizer,
            settings.deadlines.pair_s,
        )

    async def close(self) -> None:
        """Closes the senders; the rooms should have been given up before."""
        targets = list(self.targets.values())
        await asyncio.gather(*(target.close(_SENDER_CLOSE_S) for target in targets), *self._tasks)

    @property
    def n_waiting(self) -> int:
        """Rooms that wait for a slot and pages."""
        return sum(work.room.phase is PrefillPhase.QUEUED for work in self.queue)

    @property
    def threads(self) -> list[threading.Thread]:
        """What moves the rooms' state."""
        return [target.sender.thread for target in self.targets.values()]

    def drain(self, failure: Failure) -> None:
        """Refuses every room that is still to come or has not begun; the others go on."""
        self.refusing = failure
        for work in list(self.queue):
            self.step(work, GivenUp(failure))
        self.routed_rooms.fail_all(failure)

    def refuse_all(self, failure: Failure) -> None:
        """Gives up every room, and every room that is still to come."""
        self.refusing = failure
        for work in list(self.works.values()):
            self.step(work, GivenUp(failure))
        self.routed_rooms.fail_all(failure)

    def engine_died(self, failure: Failure) -> None:
        """No engine event will come any more: every room ends, and its memory is as quiet as its writes are."""
        self.refuse_all(failure)
        for work in list(self.works.values()):
            self.step(work, EngineIdle(failure))

    def tick(self) -> None:
        for work in list(self.works.values()):
            self.step(work, Tick())
        self.routed_rooms.tick()
        self._admit()

    def submit(self, request: GenerationRequest) -> NodeGeneration:
        """Takes a request over HTTP, in a room that a router named.

        Raises :class:`RequestFailed`.
        """
        failure, n_waiting = self.refusing, self.n_waiting + self.routed_rooms.n_http
        if failure is None and n_waiting >= self._max_queue:
            failure = Failure("overloaded", f"{n_waiting} requests wait for the prefill node already")
        if failure is not None:
            self.routed_rooms.turned_away(request, failure)
            raise RequestFailed(failure)
        generation = self.routed_rooms.submit(request)
        self._faults.entered("pair")
        return generation

    # --- decode nodes -------------------------------------------------------------------------------------------------

    def meet(self, peer: DecodePeer) -> None:
        """A decode node has registered: it gets its own sender."""
        self.targets[peer] = PeerSender(peer, self._arena, self._make_transport, self._on_send_result)

    def part(self, peer: DecodePeer, failure: Failure) -> None:
        """A registration is over: so are its rooms."""
        target = self.targets.pop(peer, None)
        if target is None:
            return
        for work in self.rooms_of(target):
            self.step(work, PeerLost(failure))
        self.tombstones.drop_peer(peer.incarnation)
        self.routed_rooms.lost(peer.registration)
        self._spawn(self._close_target(target))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_target(self, target: PeerSender) -> None:
        await target.close(_SENDER_CLOSE_S)
        for work in self.rooms_of(target):
            self.step(work, SenderGone())

    def enqueue(self, work: PrefillRequest) -> None:
        self.queue.append(work)
        self._admit()

    def _invite(self, waiting: Waiting) -> None:
        """The request for a room that waits on its decode node has come: that node may take memory for it."""
        self._answer(waiting, RequestArrived(**ids_of(waiting)))

    def refuse_waiting(self, waiting: Waiting, failure: Failure) -> None:
        """A room that waits on its decode node is over here. A copy of its ``Waiting`` finds the tombstone."""
        self.tombstones.bury(RoomKey(waiting.room, waiting.epoch, waiting.decode), failure, clean=True)
        self._answer(waiting, failed_message(waiting, failure, Writes.SETTLING))

    def _answer(self, waiting: Waiting, answer: AnyMessage) -> None:
        for peer in self.targets:
            if peer.registration == registration_of(waiting):
                self._send(peer, answer)

    # --- rooms --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives the head of the queue a slot, pages and the engine, again and again while there are any."""
        while self.queue:
            work = self.queue[0]
            if work.room.phase is not PrefillPhase.QUEUED:
                self.queue.popleft()
                continue
            if not self.memory.grant(work):
                return
            self.queue.popleft()
            self._start(work)

    def _start(self, work: PrefillRequest) -> None:
        try:
            command = self.memory.prepare(work)
        except Exception as error:
            log.exception("%s could not be started", work.room.key)
            failure = placement_failure(error)
            self._metrics.check_failed(failure)
            self.memory.give_back(work)
            self.step(work, GivenUp(failure))
            return
        self.step(work, Admitted())
        self._submit_command(command)
        self._queue_moved()

    def _queue_moved(self) -> None:
        for work in list(self.queue):
            self.step(work, QueueMoved())

    def rooms_of(self, target: PeerSender) -> list[PrefillRequest]:
        """The rooms of one registration."""
        return [work for work in self.works.values() if work.target is target]

    def step(self, work: PrefillRequest, event: PrefillEvent) -> None:
        """Feeds one event to one room. An exception fails this room only, and what else was to be done is done."""
        phase = work.room.phase
        try:
            actions = work.room.handle(event, time.monotonic())
            if work.room.phase is not phase:
                self._faults.entered(work.room.phase)
        except Exception as error:
            log.exception("%s failed on %s", work.room.key, type(event).__name__)
            self._on_broken(work, event, error)
            return
        for action in actions:
            try:
                self._perform(work, action)
            except Exception as error:
                log.exception("%s failed on %s", work.room.key, type(action).__name__)
                self._on_broken(work, action, error)
        self.routed_rooms.moved(work)

    def _on_broken(self, work: PrefillRequest, at: PrefillEvent | PrefillAction, error: Exception) -> None:
        if work.room.active and not isinstance(at, GivenUp):
            self.step(work, GivenUp(internal_error("prefill", error)))

    def _perform(self, work: PrefillRequest, action: PrefillAction) -> None:
        key, transfer_s = work.room.key, self._deadlines.transfer_s
        match action:
            case Send():
                self._send(work.target.peer, action.message)
            case PushPages() if work.outgoing is not None:
                if not self._faults.holds_pages(work.struck):
                    self._push(work, work.outgoing.push_pages(action.n_computed, transfer_s))
            case PushTail() if work.outgoing is not None:
                tail = partial(work.outgoing.push_tail, transfer_s)
                if self._faults.is_on:
                    self._spawn(self._push_damaged(work, tail))
                else:
                    self._push(work, tail())
            case CancelEngine():
                self._submit_command(Cancel(key))
            case CancelPush():
                work.target.sender.cancel(key)
            case Clean() if work.placement is not None:
                self._submit_command(Scrub(key, work.placement))
            case Release():
                self.memory.give_back(work)
                self._admit()
            case Forget():
                self._forget(work, action)
            case _:
                raise RuntimeError(f"{key} asks for {action} without memory")

    def _push(self, work: PrefillRequest, batch: Batch | None) -> None:
        if batch is None:
            return
        self.step(work, batch.event)
        if batch.job is not None:
            work.target.sender.send(batch.job)

    async def _push_damaged(self, work: PrefillRequest, tail: Callable[[], Batch]) -> None:
        """Fault injection: the tail goes after the damage to it, which may wait for another room."""
        try:
            if work.placement is None:
                raise RuntimeError(f"{work.room.key} has no memory")
            if await self._faults.damage(
                work.room.key,
                work.struck,
                work.n_tokens,
                work.placement,
                lambda: work.room.phase is PrefillPhase.TRANSFER,
            ):
                self._push(work, tail())
        except Exception as error:
            log.exception("%s could not be damaged", work.room.key)
            self.step(work, GivenUp(internal_error("prefill", error)))

    def _forget(self, work: PrefillRequest, action: Forget) -> None:
        room = work.room
        del self.works[room.key]
        if work in self.queue:
            self.queue.remove(work)
        self._faults.ended(room.key)
        end_of(work, action.reason or action.outcome).log()
        self._metrics.room_ended(action.outcome, action.reason)
        for phase, seconds in room.phase_s.items():
            self._metrics.phase(phase, seconds)
        if action.outcome == "committed" and room.done is not None:
            self._metrics.phase("digest", room.done.timings.digest_s)
            self._metrics.transferred({sent.component: sent.nbytes for sent in room.done.sent}, room.done.pieces)
        if not work.target.peer.lost:
            self.tombstones.bury(room.key, room.failure, clean=action.clean)
        if action.clean:
            work.target.sender.forget(room.key)

    # --- the engine's and the sender's news ---------------------------------------------------------------------------

    def on_engine_event(self, event: Event) -> None:
        """Takes one of the engine's events about a room (in the event loop)."""
        key = getattr(event, "key", None)
        work = self.works.get(key) if isinstance(key, RoomKey) else None
        if work is None:
            return
        match event:
            case ChunkComputed():
                self._queue_moved()
                self.step(work, Advanced(event.n_computed))
            case PrefillFinished():
                work.first = event.first
                self.step(work, Computed(event.digests, event.prefill_s, event.digest_s))
            case Finished():
                self.step(work, EngineIdle())
            case ComputeFailed():
                self._metrics.check_failed(event.failure)
                self.step(work, EngineIdle(event.failure))
            case Scrubbed():
                self.step(work, Cleaned())
            case _:
                pass

    def _on_send_result(self, result: SendResult) -> None:
        """Takes a sender's result (in its thread)."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_sent, result)

    def _on_sent(self, result: SendResult) -> None:
        if isinstance(result.key, ProbeKey):
            self.probes.on_result(result.key, result)
            return
        work = self.works.get(result.key) if isinstance(result.key, RoomKey) else None
        if work is None:
            return
        failure = result.failure(work.room.reserve.components)
        self.step(work, BatchEnded(result.batch_id, failure, result.quiesced))
