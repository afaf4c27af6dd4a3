"""The prefill node's rooms: drives the room state machines with messages, engine events, sender results and ticks.

What a room does next is decided by :mod:`server.transfer.prefill_room`; this file feeds it events and carries out its
actions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine

from server.cache.allocator import ItemState
from server.cache.layout import Placement
from server.cache.specs import LayoutError
from server.engine.events import (
    Cancel,
    ChunkComputed,
    Event,
    Failed,
    Finished,
    Prefill,
    PrefillFinished,
    Scrub,
    Scrubbed,
)
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest, RequestFailed
from server.node.parts import NodeParts, NodeSettings
from server.prefill.damage import SendingFaults
from server.prefill.pairing import Pairing
from server.prefill.peers import PeerSender, ProbeKey, ProbeWriter
from server.prefill.work import (
    Batch,
    Lies,
    Outgoing,
    RoomWork,
    engine_failure,
    n_tokens_of,
    placement_failure,
    read_request,
)
from server.transfer.bootstrap import DecodePeer
from server.transfer.checks import Check
from server.transfer.faults import skipped_checks
from server.transfer.plan import Side, check_holds
from server.transfer.prefill_events import (
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
from server.transfer.prefill_room import PrefillPhase, PrefillRoom, failed_message
from server.transfer.protocol import (
    Abort,
    AnyMessage,
    Committed,
    PeerMessage,
    Probe,
    ProtocolError,
    Quiesced,
    Rejected,
    Reserve,
    RoutedRequest,
    Waiting,
    Writes,
    ids_of,
)
from server.transfer.rooms import Failure, Forget, GivenUp, PeerLost, RoomKey, Send, Tick, Tombstones
from server.transfer.sender import SendOutcome, SendResult

log = logging.getLogger(__name__)

_SENDER_CLOSE_S = 5.0


class RoomDesk:
    """All rooms of a prefill node, from ``Reserve`` to release. ``send`` posts a message to a decode node.

    Lives in the event loop of the node.
    """

    def __init__(
        self, settings: NodeSettings, parts: NodeParts, send: Callable[[DecodePeer, AnyMessage], None]
    ) -> None:
        self.targets: dict[DecodePeer, PeerSender] = {}
        self.works: dict[RoomKey, RoomWork] = {}
        self.queue: deque[RoomWork] = deque()
        self._arena = parts.arena
        self._allocator = parts.allocator
        self._submit_command = parts.submit_command
        self._faults = SendingFaults(parts.arena, parts.faults)
        self._make_transport = self._faults.wrapping(parts.make_transport)
        self._send = send
        self._max_tokens = min(settings.max_context, parts.allocator.capacity_tokens)
        self._vocab_size = parts.tokenizer.vocab_size
        self._max_queue = settings.max_queue
        self._deadlines = settings.deadlines
        self._metrics = parts.metrics
        self._tombstones = Tombstones()
        self._probes = ProbeWriter(parts.arena, settings.deadlines.probe_s, send)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.refusing: Failure | None = None
        self.pairing = Pairing(self._step, self._enqueue, self._tell, parts.tokenizer, settings.deadlines.pair_s)

    async def close(self) -> None:
        """Closes the senders; the rooms should have been given up before."""
        targets = list(self.targets.values())
        await asyncio.gather(*(target.close(_SENDER_CLOSE_S) for target in targets), *self._tasks)

    @property
    def n_waiting(self) -> int:
        """Rooms that wait for a slot and pages, or for their half of the request."""
        return sum(work.room.phase is PrefillPhase.QUEUED for work in self.queue) + len(self.pairing.rooms)

    @property
    def threads(self) -> list[threading.Thread]:
        """What moves the rooms' state."""
        return [target.sender.thread for target in self.targets.values()]

    def drain(self, failure: Failure) -> None:
        """Refuses every room that is still to come or has not begun; the others go on."""
        self.refusing = failure
        for work in [*self.queue, *self.pairing.rooms]:
            self._step(work, GivenUp(failure))
        self.pairing.fail_all(failure)

    def refuse_all(self, failure: Failure) -> None:
        """Gives up every room, and every room that is still to come."""
        self.refusing = failure
        for work in list(self.works.values()):
            self._step(work, GivenUp(failure))
        self.pairing.fail_all(failure)

    def engine_died(self, failure: Failure) -> None:
        """No engine event will come any more: every room ends, and its memory is as quiet as its writes are."""
        self.refuse_all(failure)
        for work in list(self.works.values()):
            self._step(work, EngineIdle(failure))

    def tick(self) -> None:
        for work in list(self.works.values()):
            self._step(work, Tick())
        self.pairing.tick()

    def submit(self, request: GenerationRequest) -> NodeGeneration:
        """Takes a request over HTTP, in a room that a router named.

        Raises :class:`RequestFailed`.
        """
        if self.refusing is not None:
            raise RequestFailed(self.refusing.code, self.refusing.reason, status=self.refusing.status)
        n_waiting = self.n_waiting + self.pairing.n_http
        if n_waiting >= self._max_queue:
            raise RequestFailed("overloaded", f"{n_waiting} requests wait for the prefill node already", status=503)
        return self.pairing.submit(request)

    # --- BootstrapHandler ---------------------------------------------------------------------------------------------

    def on_registered(self, peer: DecodePeer) -> None:
        self.targets[peer] = PeerSender(peer, self._arena, self._make_transport, self._on_send_result)

    def on_lost(self, peer: DecodePeer, failure: Failure) -> None:
        target = self.targets.pop(peer, None)
        if target is None:
            return
        for work in self._rooms_of(target):
            self._step(work, PeerLost(failure))
        self._tombstones.drop_peer(peer.incarnation)
        self._spawn(self._close_target(target))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_target(self, target: PeerSender) -> None:
        await target.close(_SENDER_CLOSE_S)
        for work in self._rooms_of(target):
            self._step(work, SenderGone())

    def on_message(self, peer: DecodePeer, message: PeerMessage) -> None:
        target = self.targets[peer]
        match message:
            case Probe() if self.refusing is not None:
                self._probes.refuse(target, message, self.refusing.reason)
            case Probe():
                self._probes.start(target, message)
            case Reserve():
                try:
                    self._on_reserve(target, message)
                except Exception as error:
                    log.exception("a Reserve of %s could not be handled", peer)
                    self._send(peer, failed_message(message, _broken(error), Writes.SETTLING))
            case Waiting():
                self.pairing.heard(message)
            case Abort() | Committed() | Rejected():
                work = self.works.get(RoomKey(message.room, message.epoch, message.decode))
                if work is not None:
                    self._step(work, message)
                elif isinstance(message, Abort):
                    self._on_abort_of_unknown(peer, message)
            case _:
                self._metrics.dropped("direction")

    def _on_reserve(self, target: PeerSender, reserve: Reserve) -> None:
        key = RoomKey(reserve.room, reserve.epoch, reserve.decode)
        if key in self.works:
            self._step(self.works[key], reserve)
            return
        stone = self._tombstones.refuses(key)
        if stone is not None:
            failure = stone.failure or Failure("room_over", f"{key} is over already", 409)
            writes = Writes.SETTLING if self._tombstones.clean(key) else Writes.UNKNOWN
            self._send(target.peer, failed_message(reserve, failure, writes))
            return
        try:
            request = read_request(reserve)
            n_tokens = n_tokens_of(reserve, request)
            failure_at_once = self._check(target, reserve, request, n_tokens)
        except ProtocolError as error:
            self._metrics.dropped(error.kind)
            return
        room = PrefillRoom(reserve, n_tokens, self._deadlines, time.monotonic())
        work = RoomWork(room, request, target)
        self.works[key] = work
        self._faults.entered(room.phase)
        self._step(work, reserve if failure_at_once is None else GivenUp(failure_at_once))
        if isinstance(reserve.request, RoutedRequest):
            self.pairing.reserved(work)
        elif failure_at_once is None:
            self._enqueue(work)

    def _enqueue(self, work: RoomWork) -> None:
        self.queue.append(work)
        self._admit()

    def _tell(self, waiting: Waiting, failure: Failure) -> None:
        """A room that waits on its decode node is over here."""
        for peer in self.targets:
            if peer.incarnation == waiting.decode:
                self._send(peer, failed_message(waiting, failure, Writes.SETTLING))

    def _check(self, target: PeerSender, reserve: Reserve, request: GenerationRequest, n: int) -> Failure | None:
        """Why this node will never compute ``reserve`` with its ``n`` tokens, or None."""
        if self.refusing is not None:
            return self.refusing
        if self.n_waiting >= self._max_queue:
            return Failure("overloaded", f"{self.n_waiting} rooms wait for the prefill node already", 503)
        if any(work.room.key.room == reserve.room and work.target is target for work in self.works.values()):
            return Failure("duplicate_room", f"room {reserve.room} is under way in another epoch", 409)
        prompt = request.prompt_ids or (0,)  # one that comes over HTTP was checked there
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            return Failure("bad_token", f"a prompt token is not in the vocabulary of {self._vocab_size}", 400)
        if n > self._max_tokens:
            reason = f"the prompt has {n} tokens, the prefill node computes at most {self._max_tokens}"
            return Failure("context_length_exceeded", reason, 400)
        try:
            check_holds(Side(target.peer.layout, Placement(reserve.slot, reserve.pages)), n, reserve.components)
            for name in reserve.components:
                self._arena.layout.component(name)
        except LayoutError as error:
            return Failure("bad_reserve", str(error), 400)
        return None

    def _on_abort_of_unknown(self, peer: DecodePeer, abort: Abort) -> None:
        key = RoomKey(abort.room, abort.epoch, abort.decode)
        failure = Failure("aborted", abort.reason, 499)
        self.pairing.given_up(key, failure)
        if self._tombstones.clean(key):
            self._tombstones.bury(key, failure, clean=True)
            self._send(peer, Quiesced(**ids_of(abort)))
        else:
            self._send(peer, failed_message(abort, failure, Writes.UNKNOWN))

    # --- rooms --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives the head of the queue a slot, pages and the engine, again and again while there are any."""
        while self.queue:
            work = self.queue[0]
            if work.room.phase is not PrefillPhase.QUEUED:
                self.queue.popleft()
                continue
            placement = self._allocator.reserve(work.room.key, work.n_tokens)
            if placement is None:
                return
            self.queue.popleft()
            self._start(work, placement)

    def _start(self, work: RoomWork, placement: Placement) -> None:
        key, reserve, n = work.room.key, work.room.reserve, work.n_tokens
        work.placement, work.struck = placement, self._faults.strike(key)
        self._arena.owners.stamp(placement, key.owner)
        owner = None if Check.STAMP in skipped_checks(work.struck) else key.owner
        source = self._faults.start(key, work.struck, n, placement)
        try:
            if owner is not None:
                self._arena.owners.check(n, source, reserve.components, owner)
            work.outgoing = Outgoing(self._arena, source, work.target.peer, reserve, n, Lies.of(work.struck))
        except LayoutError as error:
            self._give_back(work)
            self._give_up(work, placement_failure(error))
            return
        except Exception as error:
            log.exception("%s could not be started", key)
            self._give_back(work)
            self._step(work, GivenUp(_broken(error)))
            return
        self._step(work, Admitted())
        self._submit_command(Prefill(key, work.request, source, key.room, key.epoch, owner))
        self._queue_moved()

    def _queue_moved(self) -> None:
        for work in self.queue:
            self._step(work, QueueMoved())

    def _rooms_of(self, target: PeerSender) -> list[RoomWork]:
        return [work for work in self.works.values() if work.target is target]

    def _step(self, work: RoomWork, event: PrefillEvent) -> None:
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
        self.pairing.moved(work)

    def _on_broken(self, work: RoomWork, at: PrefillEvent | PrefillAction, error: Exception) -> None:
        if work.room.active and not isinstance(at, GivenUp):
            self._step(work, GivenUp(_broken(error)))

    def _perform(self, work: RoomWork, action: PrefillAction) -> None:
        key, transfer_s = work.room.key, self._deadlines.transfer_s
        match action:
            case Send():
                self._send(work.target.peer, action.message)
            case PushPages() if work.outgoing is not None:
                if not self._faults.holds_pages(work.struck):
                    self._push(work, work.outgoing.push_pages(action.n_computed, transfer_s))
            case PushTail() if self._faults.is_on:
                self._spawn(self._push_damaged_tail(work))
            case PushTail() if work.outgoing is not None:
                self._push(work, work.outgoing.push_tail(transfer_s))
            case CancelEngine():
                self._submit_command(Cancel(key))
            case CancelPush():
                work.target.sender.cancel(key)
            case Clean() if work.placement is not None:
                self._submit_command(Scrub(key, work.placement))
            case Release():
                self._release(work)
            case Forget():
                self._forget(work, action)
            case _:
                raise RuntimeError(f"{key} asks for {action} without memory")

    def _push(self, work: RoomWork, batch: Batch | None) -> None:
        if batch is None:
            return
        self._step(work, batch.event)
        if batch.job is not None:
            work.target.sender.send(batch.job)

    async def _push_damaged_tail(self, work: RoomWork) -> None:
        """Fault injection: the tail goes after the damage to it, which may wait for another room."""
        key, n, placement, outgoing = work.room.key, len(work.request.prompt_ids), work.placement, work.outgoing
        try:
            if placement is None or outgoing is None:
                raise RuntimeError(f"{key} has no memory")
            damages = await self._faults.make(key, work.struck, n, placement)
            if work.room.phase is PrefillPhase.TRANSFER:
                self._faults.apply(key, damages)
                self._push(work, outgoing.push_tail(self._deadlines.transfer_s))
        except Exception as error:
            log.exception("%s could not be damaged", key)
            self._step(work, GivenUp(Failure("internal_error", f"the fault could not be injected: {error!r}", 500)))

    def _release(self, work: RoomWork) -> None:
        if self._allocator.state_of(work.room.key) is not ItemState.FREE:
            self._give_back(work)
        self._admit()

    def _give_back(self, work: RoomWork) -> None:
        if work.placement is not None:
            self._arena.owners.clear(work.placement, work.room.key.owner)
        self._allocator.release(work.room.key)

    def _give_up(self, work: RoomWork, failure: Failure) -> None:
        """Ends a room because a check has failed here."""
        self._metrics.check_failed(failure)
        self._step(work, GivenUp(failure))

    def _forget(self, work: RoomWork, action: Forget) -> None:
        room = work.room
        del self.works[room.key]
        self._faults.ended(room.key)
        self._metrics.room_ended(action.outcome, action.reason)
        for phase, seconds in room.phase_s.items():
            self._metrics.phase(phase, seconds)
        if action.outcome == "committed" and room.done is not None:
            self._metrics.phase("digest", room.done.timings.digest_s)
            self._metrics.transferred({sent.component: sent.nbytes for sent in room.done.sent}, room.done.pieces)
        if not work.target.peer.lost:
            self._tombstones.bury(room.key, room.failure, clean=action.clean)
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
                self._step(work, Advanced(event.n_computed))
            case PrefillFinished():
                work.first = event.first
                self._step(work, Computed(event.digests, event.prefill_s, event.digest_s))
            case Finished():
                self._step(work, EngineIdle())
            case Failed():
                failure = engine_failure(event)
                self._metrics.check_failed(failure)
                self._step(work, EngineIdle(failure))
            case Scrubbed():
                self._step(work, Cleaned())
            case _:
                pass

    def _on_send_result(self, result: SendResult) -> None:
        """Takes a sender's result (in its thread)."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_sent, result)

    def _on_sent(self, result: SendResult) -> None:
        if isinstance(result.key, ProbeKey):
            self._probes.on_result(result.key, result)
            return
        work = self.works.get(result.key) if isinstance(result.key, RoomKey) else None
        if work is None:
            return
        failure = None
        if result.outcome is not SendOutcome.APPLIED:
            component = result.reason.partition(":")[0]
            is_named = component in work.room.reserve.components
            reason = f"the transfer ended {result.outcome}: {result.reason}"
            failure = Failure("transfer_failed", reason, 502, component if is_named else "")
        self._step(work, BatchEnded(result.batch_id, failure, result.quiesced))


def _broken(error: Exception) -> Failure:
    return Failure("internal_error", f"the prefill node failed: {error!r}", 500)
