"""The prefill node's rooms: takes them from decode nodes, has their prompts computed, and sends the state.

What a room does next is decided by :mod:`server.prefill.room`; this file feeds it messages, engine events, results of
the sender and ticks, and carries out its actions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from server.engine.events import (
    Cancel,
    ChunkComputed,
    ComputeFailed,
    Event,
    Finished,
    HitRefused,
    PrefillFinished,
    PromptScored,
    Scrub,
    Scrubbed,
    SnapshotTaken,
)
from server.engine.generation import NodeGeneration
from server.engine.prompt_logprobs import ENTRY_NBYTES
from server.engine.request import GenerationRequest
from server.failure import Failure, RequestFailed, internal_error
from server.node.context import NodeContext, NodeSettings
from server.node.request_log import log_end
from server.prefill.decode_peer import DecodePeer
from server.prefill.ended_rooms import answer_abort, answer_if_over
from server.prefill.events import (
    Admitted,
    Advanced,
    BatchEnded,
    CacheDamaged,
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
    QueueAgain,
    QueueMoved,
    Release,
    Scored,
    SenderGone,
)
from server.prefill.kv_sender import SendResult
from server.prefill.probe import ProbeKey, ProbeWriter
from server.prefill.recording import count_end, note_phase, note_refused_hit, open_record
from server.prefill.request import Batch, Outgoing, PrefillRequest, n_tokens_of, read_request
from server.prefill.room import PrefillPhase, PrefillRoom, failed_message
from server.prefill.room_memory import RoomMemory, placement_failure
from server.prefill.routed_rooms import RoutedRooms
from server.prefill.senders import MakeSender, Senders
from server.telemetry.latency import RequestMetrics
from server.telemetry.rooms import PREFILL, RoomRecords
from server.transfer.frames import ProtocolError
from server.transfer.protocol import (
    Abort,
    Committed,
    PeerMessage,
    Probe,
    PromptLogprobsReceived,
    Rejected,
    Reserve,
    RoutedRequest,
    Waiting,
    Writes,
)
from server.transfer.rooms import Forget, GivenUp, PeerLost, RoomKey, Send, Tick, Tombstones

log = logging.getLogger(__name__)


class PrefillRoomManager:
    """All rooms of a prefill node, from ``Reserve`` to release. Lives in the event loop of the node.

    Its ports, so that a simulation can drive it on a loop and a clock of its own, without network, threads or model:

    - messages go out by :meth:`DecodePeer.send` and come in by :meth:`on_registered`, :meth:`on_message` and
      :meth:`on_lost`, all three called by :class:`~server.prefill.bootstrap.Bootstrap`;
    - commands for the engine go to ``context.submit_command``, its events come in by :meth:`on_engine_event`;
    - state is written by ``senders``, by what ``make_sender`` builds for each peer;
    - time is ``context.clock`` and :meth:`tick`, which is to be called again and again.
    """

    def __init__(self, settings: NodeSettings, context: NodeContext, make_sender: MakeSender | None = None) -> None:
        self.senders = Senders(context, self._on_sent, make_sender)
        self.reqs: dict[RoomKey, PrefillRequest] = {}
        self.queue: deque[PrefillRequest] = deque()
        self.refusing: Failure | None = None
        self.tombstones = Tombstones()
        self.request_metrics = RequestMetrics(context.metrics.registry, PREFILL)
        self.records = RoomRecords(PREFILL, settings.keep_rooms, context.clock, context.traces)
        self.records.on_end += [self.request_metrics.ended, log_end]
        self.routed_rooms = RoutedRooms(
            self.step, self.tombstones, context.tokenizer, settings.deadlines.pair_s, context.clock, self.records
        )
        self.probes = ProbeWriter(context.arena, settings.deadlines.probe_s, context.clock)
        self._clock = context.clock
        self._submit_command = context.submit_command
        self._metrics = context.metrics
        self._max_queue = settings.max_queue
        self._deadlines = settings.deadlines
        self._hooks = context.hooks
        self._memory = RoomMemory(settings, context)

    async def close(self) -> None:
        """Closes the senders; the rooms should have been given up before."""
        await self.senders.close()

    @property
    def n_waiting(self) -> int:
        """Rooms that wait for a slot and pages."""
        return sum(req.room.phase is PrefillPhase.QUEUED for req in self.queue)

    def drain(self, failure: Failure) -> None:
        """Refuses every room that is still to come or has not begun; the others go on."""
        self.refusing = failure
        for req in list(self.queue):
            self.step(req, GivenUp(failure))
        self.routed_rooms.fail_all(failure)

    def refuse_all(self, failure: Failure) -> None:
        """Gives up every room, and every room that is still to come."""
        self.refusing = failure
        for req in list(self.reqs.values()):
            self.step(req, GivenUp(failure))
        self.routed_rooms.fail_all(failure)

    def engine_died(self, failure: Failure) -> None:
        """No engine event will come any more: every room ends, and its memory is free when its writes have ended."""
        self.refuse_all(failure)
        for req in list(self.reqs.values()):
            self.step(req, EngineIdle(failure))

    def tick(self) -> None:
        for req in list(self.reqs.values()):
            self.step(req, Tick())
        self.routed_rooms.tick()
        self._admit()

    def submit(self, request: GenerationRequest) -> NodeGeneration:
        """Takes a request over HTTP, in a room that a router chose.

        Raises :class:`RequestFailed`.
        """
        failure, n_waiting = self.refusing, self.n_waiting + self.routed_rooms.n_http
        if failure is None and n_waiting >= self._max_queue:
            failure = Failure("overloaded", f"{n_waiting} requests wait for the prefill node already")
        if failure is not None:
            self.routed_rooms.turned_away(request, failure)
            raise self._refused(request, RequestFailed(failure))
        try:
            generation = self.routed_rooms.submit(request)
        except RequestFailed as refused:
            raise self._refused(request, refused) from None
        self._hooks.entered("pair")
        return generation

    def _refused(self, request: GenerationRequest, refused: RequestFailed) -> RequestFailed:
        room = None if request.routed is None else request.routed.room
        self.records.refused(request.request_id, room, refused.failure)
        self.request_metrics.refused(refused.code)
        return refused

    # --- decode nodes -------------------------------------------------------------------------------------------------

    def on_registered(self, peer: DecodePeer) -> None:
        """A decode node has registered: it gets its own sender."""
        self.senders.start(peer)
        self._metrics.peer_known(peer.name)

    def on_lost(self, peer: DecodePeer, failure: Failure) -> None:
        """A registration is over: so are its rooms."""
        if peer not in self.senders:
            return
        self.senders.end(peer, self._on_sender_gone)
        for req in self._reqs_of(peer):
            self.step(req, PeerLost(failure))
        self._metrics.peer_gone(peer.name)
        self.tombstones.drop_peer(peer.incarnation)
        self.routed_rooms.on_lost(peer)
        self.probes.on_lost(peer)

    def _on_sender_gone(self, peer: DecodePeer) -> None:
        for req in self._reqs_of(peer):
            self.step(req, SenderGone())

    def _reqs_of(self, peer: DecodePeer) -> list[PrefillRequest]:
        return [req for req in self.reqs.values() if req.peer is peer]

    def on_message(self, peer: DecodePeer, message: PeerMessage) -> None:
        match message:
            case Probe() if self.refusing is not None:
                self.probes.refuse(peer, message, self.refusing.reason)
            case Probe():
                self.probes.start(peer, self.senders[peer], message)
            case Reserve():
                try:
                    self._on_reserve(peer, message)
                except Exception as error:
                    log.exception("a Reserve of %s could not be handled", peer)
                    peer.send(failed_message(message, internal_error("prefill", error), Writes.SETTLING))
            case Waiting():
                self._on_waiting(peer, message)
            case Abort() | Committed() | Rejected() | PromptLogprobsReceived():
                req = self.reqs.get(RoomKey.of(message))
                if req is not None:
                    self.step(req, message)
                elif isinstance(message, Abort):
                    failure = Failure("aborted", message.reason)
                    self.routed_rooms.given_up(RoomKey.of(message), failure)
                    answer_abort(peer, message, failure, self.tombstones)
            case _:
                self._metrics.dropped("direction")

    def _on_reserve(self, peer: DecodePeer, reserve: Reserve) -> None:
        key = RoomKey.of(reserve)
        if key in self.reqs:
            self.step(self.reqs[key], reserve)
            return
        if answer_if_over(peer, reserve, self.tombstones):
            return
        try:
            request = read_request(reserve)
            n_tokens = n_tokens_of(reserve, request)
            failure = self._check(peer, reserve, request, n_tokens)
        except ProtocolError as error:
            self._metrics.dropped(error.kind)
            return
        now = self._clock()
        record = open_record(self.records, peer, reserve, request, n_tokens, now)
        room = PrefillRoom(reserve, n_tokens, self._deadlines, now)
        req = self.reqs[key] = PrefillRequest(room, request, peer, self.senders[peer], record)
        self._hooks.entered(room.phase)
        if isinstance(reserve.request, RoutedRequest):
            failure = self.routed_rooms.join(req, failure)
        self.step(req, reserve if failure is None else GivenUp(failure))
        if room.active:
            self._memory.look_up(req)
            self.queue.append(req)
            self._admit()

    def _check(self, peer: DecodePeer, reserve: Reserve, request: GenerationRequest, n: int) -> Failure | None:
        """Why this node will never compute ``reserve`` with its ``n`` tokens, or None."""
        if self.refusing is not None:
            return self.refusing
        if self.n_waiting >= self._max_queue:
            return Failure("overloaded", f"{self.n_waiting} rooms wait for the prefill node already")
        if any(req.key.room == reserve.room for req in self._reqs_of(peer) if req.room.active):
            return Failure("duplicate_room", f"room {reserve.room} is under way in another epoch")
        return self._memory.refuses(peer, reserve, request, n)

    def _on_waiting(self, peer: DecodePeer, waiting: Waiting) -> None:
        """A room that is over here, or will never be taken, is answered so again and again: the answer may be lost."""
        if RoomKey.of(waiting) in self.reqs:
            return  # a copy from before the room was reserved
        if answer_if_over(peer, waiting, self.tombstones):
            return
        if self.refusing is not None:
            self.routed_rooms.refuse(peer, waiting, self.refusing)
        else:
            self.routed_rooms.on_waiting(peer, waiting)

    # --- rooms --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives rooms a slot, pages and the engine, the first one of the queue first, while there are any.

        One that waits for what another room is about to compute lets those behind it go first.
        """
        for req in list(self.queue):
            if req.room.phase is PrefillPhase.QUEUED:
                others = self._under_way()
                if self._memory.waits(req, others):
                    continue
                if not self._grant(req, others):
                    return
            if req in self.queue:
                self.queue.remove(req)
            if req.placement is not None and req.room.phase is PrefillPhase.QUEUED:
                self._start(req)

    def _grant(self, req: PrefillRequest, others: list[PrefillRequest]) -> bool:
        """Whether the room needs no more memory: it has some, or has failed."""
        try:
            return self._memory.grant(req, others)
        except Exception as error:
            log.exception("%s got no memory", req.key)
            self._memory.give_back(req)
            self.step(req, GivenUp(internal_error("prefill", error)))
            return True

    def _under_way(self) -> list[PrefillRequest]:
        """Rooms of which the prompt is to be computed, or is being computed."""
        phases = (PrefillPhase.QUEUED, PrefillPhase.PREFILL)
        return [req for req in self.reqs.values() if req.room.phase in phases]

    def _start(self, req: PrefillRequest) -> None:
        try:
            command = self._memory.prepare(req)
        except Exception as error:
            log.exception("%s could not be started", req.key)
            failure = placement_failure(error)
            self._metrics.check_failed(failure)
            self._memory.give_back(req)
            self.step(req, GivenUp(failure))
            return
        self._submit_command(command)  # first of all: the engine can begin
        self.step(req, Admitted(0 if req.prefix is None else req.prefix.n_reused))
        self._queue_moved()
        self._plan_ahead(req)

    def _plan_ahead(self, req: PrefillRequest) -> None:
        try:
            if req.outgoing is not None:
                req.outgoing.plan_ahead()
        except Exception as error:
            log.exception("the last batch of %s could not be planned", req.key)
            self._fail(req, PushTail(), error)

    def _queue_moved(self) -> None:
        for req in list(self.queue):
            self.step(req, QueueMoved())

    def step(self, req: PrefillRequest, event: PrefillEvent) -> None:
        """Feeds one event to one room. An exception fails this room only, and what else was to be done is done."""
        phase, now = req.room.phase, self._clock()
        try:
            actions = req.room.handle(event, now)
            if req.room.phase is not phase:
                if req.prefix is not None and req.room.phase is not PrefillPhase.PREFILL:
                    req.prefix.ended()
                self._hooks.entered(req.room.phase)
                note_phase(self.records, req, now)
        except Exception as error:
            log.exception("%s failed on %s", req.key, type(event).__name__)
            self._fail(req, event, error)
            return
        for action in actions:
            try:
                self.perform(req, action)
            except Exception as error:
                log.exception("%s failed on %s", req.key, type(action).__name__)
                self._fail(req, action, error)
        self.routed_rooms.moved(req)

    def _fail(self, req: PrefillRequest, at: PrefillEvent | PrefillAction, error: Exception) -> None:
        if req.room.active and not isinstance(at, GivenUp):
            self.step(req, GivenUp(internal_error("prefill", error)))

    def perform(self, req: PrefillRequest, action: PrefillAction) -> None:
        match action:
            case Send():
                req.peer.send(action.message)
            case PushPages() if req.outgoing is not None:
                self._push(req, req.outgoing.push_pages(action.n_computed, self._transfer_deadline()))
                self._plan_ahead(req)
            case PushTail() if req.outgoing is not None:
                push = partial(self._push_tail, req, req.outgoing)
                self._hooks.before_tail(req.key, push, lambda: req.room.phase is PrefillPhase.TRANSFER)
            case QueueAgain():
                self._memory.give_back(req)
                self.queue.appendleft(req)
                self._admit()
            case CancelEngine():
                self._submit_command(Cancel(req.key))
            case CancelPush():
                req.sender.cancel(req.key)
            case Clean() if req.placement is not None:
                self._submit_command(Scrub(req.key, req.placement))
            case Release():
                self._memory.give_back(req)
                self._admit()
            case Forget():
                self._forget(req, action)
            case _:
                raise RuntimeError(f"{req.key} asks for {action} without memory")

    def _transfer_deadline(self) -> float:
        return self._clock() + self._deadlines.transfer_s

    def _push_tail(self, req: PrefillRequest, outgoing: Outgoing) -> None:
        if req.room.phase is not PrefillPhase.TRANSFER:
            return
        try:
            self._push(req, outgoing.push_tail(self._transfer_deadline()))
        except Exception as error:  # a hook may call this from a task of its own
            log.exception("%s failed on its tail", req.key)
            self._fail(req, PushTail(), error)

    def _push(self, req: PrefillRequest, batch: Batch | None) -> None:
        if batch is None:
            return
        self.step(req, batch.event)
        if batch.job is not None:
            req.sender.send(batch.job)

    def _forget(self, req: PrefillRequest, action: Forget) -> None:
        room, key = req.room, req.key
        del self.reqs[key]
        if req in self.queue:
            self.queue.remove(req)
        count_end(self._metrics, req, action)
        if not req.peer.lost:
            self.tombstones.add(key, room.failure, clean=action.clean)
        if action.clean:
            req.sender.forget(key)

    # --- the engine's events and the senders' results -----------------------------------------------------------------

    def on_engine_event(self, event: Event) -> None:
        """Takes one of the engine's events about a room (in the event loop)."""
        key = getattr(event, "key", None)
        req = self.reqs.get(key) if isinstance(key, RoomKey) else None
        if req is None:
            return
        match event:
            case ChunkComputed():
                self._queue_moved()
                self._note_pages(req, event.pages)
                self.step(req, Advanced(event.n_computed))
                self._keep_pages(req, event.pages)
            case SnapshotTaken():
                self._memory.keep_snapshot(req, event.snapshot)
                self._admit()  # some may have waited for it
            case HitRefused():
                self._metrics.check_failed(event.failure)
                self._memory.refused(req, event)
                note_refused_hit(req, event.failure, self._clock())
                self.step(req, CacheDamaged())
            case PromptScored():
                self._metrics.prompt_logprobs(len(event.rows) // ENTRY_NBYTES)
                if req.scores_kept is not None:
                    req.scores_kept += event.rows
                self.step(req, Scored(event.rows))
            case PrefillFinished():
                req.first = event.first
                self._note_pages(req, event.pages)
                self.step(req, Computed(event.parts, event.prefill_s, event.digest_s))
                self._keep_pages(req, event.pages)
                self._admit()
            case Finished():
                self.step(req, EngineIdle())
            case ComputeFailed():
                self._metrics.check_failed(event.failure)
                self._memory.failed(req)
                self.step(req, EngineIdle(event.failure))
            case Scrubbed():
                self.step(req, Cleaned())
            case _:
                pass

    def _note_pages(self, req: PrefillRequest, digests: Sequence[bytes]) -> None:
        """The next pages of a room are complete: it is known which of them its decode node has."""
        if req.outgoing is not None:
            req.outgoing.pages_complete(digests)

    def _keep_pages(self, req: PrefillRequest, digests: Sequence[bytes]) -> None:
        try:
            self._memory.keep_pages(req, digests)
        except Exception as error:
            log.exception("the pages of %s could not be kept", req.key)
            self.step(req, GivenUp(internal_error("prefill", error)))

    def _on_sent(self, result: SendResult) -> None:
        """Takes a sender's result (in the event loop)."""
        if isinstance(result.key, ProbeKey):
            self.probes.on_result(result.key, result)
            return
        req = self.reqs.get(result.key) if isinstance(result.key, RoomKey) else None
        if req is None:
            return
        failure = result.failure(req.room.reserve.components)
        self.step(req, BatchEnded(result.batch_id, failure, result.quiesced))
