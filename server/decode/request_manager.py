"""The decode node's requests: a queue, memory for its head, a room with a prefill node, then the engine, to the end.

A request's way: ``submit`` checks it and queues it -> ``admit`` gives it a slot and pages and opens a room with a
prefill node (:mod:`.room_manager`) -> ``perform`` hands it to the engine when the room commits -> engine events fill
its stream -> its memory is released.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from functools import partial

from server.decode.admission import check_request, choose_room, tokens_held, wire_sampling, with_seed
from server.decode.dialer import MakeDialer
from server.decode.outputs import Outputs
from server.decode.prefill_link import PrefillLink
from server.decode.quarantine import Quarantine
from server.decode.request import DecodeRequest
from server.decode.request_queue import RequestQueue
from server.decode.room import Commit, FailClient, Free, RequestAction
from server.decode.room_manager import DecodeRoomManager
from server.decode.room_memory import RoomMemory
from server.decode.routed_rooms import announce, has_arrived, link_of, withdraw
from server.decode.settings import DecodeSettings
from server.engine.events import (
    Cancel,
    ComputeFailed,
    Event,
    Finished,
    Generate,
    Prepare,
    Resume,
    Scrub,
    Scrubbed,
)
from server.engine.generation import NodeGeneration
from server.engine.request import FinishReason, GenerationRequest
from server.failure import Failure, RequestFailed, internal_error
from server.node.context import NodeContext
from server.node.request_log import log_end
from server.telemetry.latency import RequestMetrics
from server.telemetry.record import PhaseName
from server.telemetry.rooms import DECODE, RoomRecords
from server.transfer.checks import Check
from server.transfer.rooms import GivenUp, RoomKey

log = logging.getLogger(__name__)

_RELEASING = (Finished, ComputeFailed, Scrubbed)
"""Events after which the engine does not touch the request's memory again."""


class RequestManager:
    """All requests of a decode node, from ``submit`` until their memory is free again. Lives in the node's event loop.

    Owns memory and clients: nobody else reserves or releases memory, or speaks to a client. ``make_dialer`` makes the
    connection to a prefill node; None: a ZMQ socket.
    """

    def __init__(
        self,
        settings: DecodeSettings,
        context: NodeContext,
        incarnation: str,
        make_dialer: MakeDialer | None = None,
    ) -> None:
        self.reqs: dict[RoomKey, DecodeRequest] = {}
        self.by_room: dict[int, DecodeRequest] = {}
        """By room id, the latest attempt at it."""
        self.queue = RequestQueue(settings.deadlines.admission_s, context.clock)
        self.quarantine = Quarantine()
        self.rooms = DecodeRoomManager(
            settings,
            context,
            incarnation,
            make_dialer=make_dialer,
            on_action=self.perform,
            on_broken=self._on_broken,
            on_waiting=self._on_waiting,
            on_peers_changed=self._on_peers_changed,
        )
        self._settings = settings
        self._context = context
        self._clock = context.clock
        self._incarnation = incarnation
        self._is_local = settings.prefill is None
        """Prompts are computed here, without any peer or room."""
        self._allocator = context.allocator
        self._memory = RoomMemory(context, is_local=self._is_local)
        self._submit_command = context.submit_command
        self._metrics = context.metrics
        self.request_metrics = RequestMetrics(context.metrics.registry, DECODE)
        self.outputs = Outputs(settings, context, self.request_metrics, self.queue)
        self.records = RoomRecords(DECODE, settings.keep_rooms, context.clock, context.traces)
        self.records.on_end += [self.request_metrics.ended, log_end]
        self._epochs = itertools.count(1)
        self._refusing: Failure | None = None

    def start(self) -> None:
        """Connects to the prefill nodes (without waiting for them)."""
        self._metrics.watch(
            self._allocator,
            queued=lambda: len(self.queue),
            running=lambda: len(self.reqs) - len(self.queue),
            peers=lambda: self.rooms.peers.n_registered,
            quarantine_s=lambda: self.quarantine.oldest_s(self._clock()),
        )
        for link in self.rooms.peers.links:
            self._metrics.peer_known(link.address)
        self.rooms.peers.start()

    async def close(self) -> None:
        """Closes every connection and transport session; the requests should have been given up before."""
        await self.rooms.close()

    def drain(self, failure: Failure) -> None:
        """Refuses every request that is still to come or has no room yet; the others go on."""
        self._refusing = failure
        self._fail_waiting((req, failure) for req in self.queue)

    def refuse_all(self, failure: Failure) -> None:
        """Gives up every request, and every request that is still to come."""
        self._refusing = failure
        for req in list(self.reqs.values()):
            self._give_up(req, failure)

    def engine_died(self, failure: Failure) -> None:
        """No engine event will come any more: every client gets ``failure``."""
        self._refusing = failure
        for req in list(self.reqs.values()):
            req.generation.fail(RequestFailed(failure))

    async def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now: with peers, whether a probe write by one of them really arrives."""
        try:
            self._check_serving()
        except RequestFailed as failure:
            return False, failure.failure.reason
        return (True, "local prefill") if self._is_local else await self.rooms.peers.ready()

    # --- admission ----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, room: int | None = None) -> NodeGeneration:
        """Admits a request; ``room`` None draws one, if the request does not name one.

        Raises :class:`RequestFailed` at once for what cannot be served.
        """
        try:
            return self._submit(request, room)
        except RequestFailed as refused:
            routed = request.routed.room if request.routed is not None else room
            self.records.refused(request.request_id, routed, refused.failure)
            self.request_metrics.refused(refused.code)
            raise

    def _submit(self, request: GenerationRequest, room: int | None) -> NodeGeneration:
        self._check_serving()
        link = None
        if request.routed is not None:
            if self._is_local:
                message = "this node computes prompts itself (--local-prefill): it has no rooms with a prefill node"
                raise RequestFailed(Failure("wrong_role", message))
            link = link_of(self.rooms.peers.links, request.routed)
        check_request(
            request,
            max_context=self._settings.max_context,
            vocab_size=self._context.tokenizer.vocab_size,
            spec_tokens=self._settings.spec_tokens,
            allocator=self._allocator,
            is_local=self._is_local,
        )
        request = with_seed(request)
        sampling = wire_sampling(request.sampling)
        room_id = choose_room(request, room, self.by_room)
        if len(self.queue) >= self._settings.max_queue:
            reason = f"{len(self.queue)} requests wait for a slot and pages already"
            raise RequestFailed(Failure("overloaded", reason))
        generation = NodeGeneration(
            lambda: self._abort(room_id),
            room=None if self._is_local else room_id,
            on_end=partial(self._end_record, room_id),
        )
        record = self.records.open(
            room_id,
            request.request_id,
            n_prompt=len(request.prompt_ids),
            max_new=request.sampling.max_tokens,
            first=PhaseName.RECEIVE,
            began=request.arrived_at,
            traceparent=request.traceparent,
        )
        now = self._clock()
        record.enter(PhaseName.QUEUE if link is None else PhaseName.PAIR, now)
        req = DecodeRequest(self._new_key(room_id), request, sampling, generation, record, now, link=link)
        self._enter(req)
        self.queue.put(req)
        self._announce(req)
        self._context.hooks.entered("waiting")
        if link is not None:
            self._context.hooks.entered("pair")
        self.admit()
        return generation

    def _check_serving(self) -> None:
        """Raises :class:`RequestFailed` with the reason if no request can be served now."""
        if self._refusing is not None:
            raise RequestFailed(self._refusing)
        if not self._is_local and not self.rooms.peers.has_any():
            raise RequestFailed(Failure("no_prefill", self.rooms.peers.why_none()))

    def _new_key(self, room: int) -> RoomKey:
        return RoomKey(room, next(self._epochs), self._incarnation)

    def _enter(self, req: DecodeRequest) -> None:
        self.reqs[req.key] = self.by_room[req.key.room] = req

    def _forget(self, req: DecodeRequest) -> None:
        self.reqs.pop(req.key, None)
        if self.by_room.get(req.key.room) is req:
            del self.by_room[req.key.room]

    def _end_record(self, room: int, outcome: str, failure: Failure | None) -> None:
        if (req := self.by_room.get(room)) is not None:
            self.records.end(req.record, outcome, self._clock(), failure)

    def admit(self) -> None:
        """Gives those whose turn it is a slot and pages, while there are any."""
        if self._refusing is not None or self._allocator.is_full:
            return
        under_way = [req for req in self.reqs.values() if req.placement is not None]
        for req in self.queue.in_turn(under_way):
            if req not in self.queue:
                continue  # it ended while one before it began
            if req.request.routed is not None and not has_arrived(req):
                continue  # its prefill node has not its half yet, and may never have it
            link = self._link_for(req)
            if link is None and not self._is_local:
                continue  # its prefill node registers anew; the others need not wait for that
            n_held = tokens_held(req.request, self._settings.spec_tokens, is_local=self._is_local)
            try:
                placement = self._memory.grant(req, n_held)
            except Exception as error:
                log.exception("%s could not be granted memory", req.key)
                self._fail_waiting([(req, internal_error("decode", error))])
                self._memory.give_back(req)
                continue
            if placement is None:
                return
            self.queue.remove(req)
            self.queue.note_progress()
            req.link, now = link, self._clock()
            self._metrics.phase("admission", now - req.enqueued_at)
            peer = link.address if link is not None else "local"
            req.record.attempt(req.key.epoch, peer, placement.slot, len(placement.pages))
            req.record.enter(PhaseName.PREFILL if link is None else PhaseName.RESERVE, now)
            try:
                if link is not None:
                    self.rooms.open(req)
                    if req.room is not None and req.room.active and req.request.sampling.max_tokens:
                        self._submit_command(Prepare(req.key, req.request))
                else:
                    self._allocator.commit(req.key)
                    self._submit_command(Generate(req.key, req.request, placement))
            except Exception as error:
                log.exception("%s could not be started", req.key)
                req.generation.fail(RequestFailed(internal_error("decode", error)))
                self._submit_command(Scrub(req.key, placement))

    def _link_for(self, req: DecodeRequest) -> PrefillLink | None:
        """The prefill node that computes the prompt; None if there is none now."""
        if req.link is not None and (req.link.registered or req.request.routed is not None):
            return req.link if req.link.registered else None
        return self.rooms.peers.pick(req.avoids)

    def _announce(self, *reqs: DecodeRequest) -> None:
        """Announces routed rooms to their prefill nodes, and ends those that can come to nothing."""
        pair_s, now = self._settings.deadlines.pair_s, self._clock()
        failures = [(req, announce(req, pair_s, now)) for req in reqs]
        self._fail_waiting((req, failure) for req, failure in failures if failure is not None)

    def _fail_waiting(self, failures: Iterable[tuple[DecodeRequest, Failure]]) -> None:
        """Ends requests that wait, each with its reason."""
        for req, failure in failures:
            req.generation.fail(RequestFailed(failure))
            self._metrics.room_ended("failed", failure.code)
            self._drop(req, failure.reason)

    def _drop(self, req: DecodeRequest, reason: str) -> None:
        """A request ends before it had memory; its client knows already."""
        self.queue.remove(req)
        withdraw(req, reason)
        self._forget(req)

    def _abort(self, room: int) -> None:
        if (req := self.by_room.get(room)) is not None:
            self._give_up(req, Failure("aborted", "the client aborted the request"))

    def _give_up(self, req: DecodeRequest, failure: Failure) -> None:
        """Ends a request wherever it is: in the queue, in its room, or in the engine."""
        if req in self.queue:
            self._end_generation(req, failure)
            self._drop(req, failure.reason)
        elif req.room is not None and req.room.active:
            self.rooms.step(req, GivenUp(failure))
        elif not req.generation.ended:
            self._submit_command(Cancel(req.key))
            if failure.code != "aborted":
                req.generation.fail(RequestFailed(failure))

    def _end_generation(self, req: DecodeRequest, failure: Failure) -> None:
        if failure.code == "aborted":
            req.generation.finish(FinishReason.ABORT)
        else:
            req.generation.fail(RequestFailed(failure))

    # --- rooms --------------------------------------------------------------------------------------------------------

    def perform(self, req: DecodeRequest, action: RequestAction) -> None:
        """Does what a room wants done with its request's memory and client."""
        match action:
            case Commit():
                self._resume(req, action)
            case FailClient():
                self._fail(req, action.failure)
            case Free():
                self._scrub(req)

    def _resume(self, req: DecodeRequest, commit: Commit) -> None:
        if req.link is None:
            raise RuntimeError(f"{req.key} was committed without a peer")
        placement = self._memory.settle(req)
        self._allocator.commit(req.key)
        sampling = req.request.sampling
        if sampling.max_tokens:
            owner = None if Check.STAMP in req.skipped else req.key.owner
            self._submit_command(Resume(req.key, req.request, placement, commit.first, owner))
            req.resumed = True
        self.outputs.committed(req, req.link, commit)
        if not sampling.max_tokens:
            req.generation.finish(FinishReason.LENGTH)
            self._scrub(req)

    def _fail(self, req: DecodeRequest, failure: Failure) -> None:
        """Another prefill node is asked if that may help, or the same one, where only pages of this node were damaged.
        What this attempt has stays in quarantine, under its key.
        """
        log.warning("%s (%s) failed: %s: %s", req.key, req.request.request_id, failure.code, failure.reason)
        link, now = req.link, self._clock()
        self._allocator.quarantine(req.key)
        req.record.attempt_failed(failure)
        self._memory.forget_damaged(req, failure)
        self.quarantine.enter(req.key, failure, link.address if link else "", now)
        may_retry = self._refusing is None and req.may_be_retried(failure)
        again = req.next_attempt(self._new_key(req.key.room), link, failure, now) if link and may_retry else None
        if again is None or self._link_for(again) is None:
            self._end_generation(req, failure)
            return
        log.info("%s is tried again as epoch %d", req.key, again.key.epoch)
        self._metrics.retried(failure.code)
        req.record.try_again(now)
        self._enter(again)
        self.queue.put_first(again)
        self.admit()

    def _scrub(self, req: DecodeRequest) -> None:
        """Nothing writes into the memory any more."""
        if req.placement is not None:
            self._submit_command(Scrub(req.key, req.placement))

    def _on_broken(self, req: DecodeRequest, error: Exception) -> None:
        """Something here failed after the room was over or committed; of a committed one the engine may have begun."""
        req.generation.fail(RequestFailed(internal_error("decode", error)))
        if req.resumed:
            self._submit_command(Cancel(req.key))
        elif req.is_committed:
            self._scrub(req)

    def _on_waiting(self, key: RoomKey, failure: Failure | None) -> bool:
        """The prefill node has its half of a room that waits here, or has ended it. False if no such room waits."""
        req = self.queue.find(key)
        if req is None or (failure is None and req.announced is None):
            return False
        if failure is not None:
            req.announced = None
            self._fail_waiting([(req, failure)])
        elif req.announced is not None:
            req.announced.has_arrived = True
            if req.record.phase is PhaseName.PAIR:
                req.record.enter(PhaseName.QUEUE, self._clock())
            self.admit()
        return True

    def _on_peers_changed(self) -> None:
        self._fail_waiting(self.queue.without_peer(self.rooms.peers))
        self._announce(*self.queue)
        self.admit()

    # --- engine -------------------------------------------------------------------------------------------------------

    def on_engine_event(self, event: Event) -> None:
        """Takes one of the engine's events about a request (in the event loop)."""
        self.queue.note_progress()
        key = getattr(event, "key", None)
        req = self.reqs.get(key) if isinstance(key, RoomKey) else None
        if req is None:
            return
        try:
            self.outputs.take(req, event)
            if isinstance(event, Finished):
                self._memory.keep(req, event)
        except Exception as error:
            log.exception("%s failed on %s", req.key, type(event).__name__)
            req.generation.fail(RequestFailed(internal_error("decode", error)))
            self._submit_command(Cancel(req.key))
        if isinstance(event, _RELEASING):
            self._release(req)

    def _release(self, req: DecodeRequest) -> None:
        self._memory.give_back(req)
        self.quarantine.leave(req.key)
        self._forget(req)
        self.admit()

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self._is_local:
            self.rooms.tick()
            self._fail_waiting(self.queue.without_peer(self.rooms.peers))
        self._announce(*self.queue)
        self._fail_waiting(self.queue.overdue())
        self.admit()
        self.quarantine.warn(self._clock())
