"""The decode node's requests: a queue, memory for its head, a room with a prefill node, then the engine, to the end.

A request's way: ``submit`` checks it and queues it -> ``_admit`` gives it a slot and pages and opens a room with a
prefill node (:mod:`.room_manager`) -> ``room_committed`` hands it to the engine -> engine events fill its stream -> its
memory is released.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

from server.cache.allocator import ItemState
from server.cache.layout import Placement
from server.decode.admission import check_request, choose_room, tokens_held, with_seed
from server.decode.draft_metrics import DraftMetrics
from server.decode.prefill_link import PrefillLink
from server.decode.quarantine import Quarantine
from server.decode.request import DecodeRequest
from server.decode.request_queue import RequestQueue
from server.decode.room import DecodePhase
from server.decode.room_manager import DecodeRoomManager
from server.decode.routed_rooms import link_of
from server.decode.settings import DecodeSettings
from server.engine.events import Cancel, ComputeFailed, Event, Finished, Generate, Output, Resume, Scrub, Scrubbed
from server.engine.generation import NodeGeneration
from server.engine.request import FinishReason, GenerationRequest, RouteInfo, TokenLogprob, TokenOutput
from server.failure import Failure, RequestFailed, internal_error
from server.node.context import NodeContext
from server.transfer.checks import Check
from server.transfer.protocol import Done
from server.transfer.rooms import RoomKey

log = logging.getLogger(__name__)


class RequestManager:
    """All requests of a decode node, from ``submit`` until their memory is free again. Lives in the node's event loop.

    ``receiver`` is None where prompts are computed here.
    """

    def __init__(self, settings: DecodeSettings, parts: NodeContext, incarnation: str) -> None:
        self.works: dict[RoomKey, DecodeRequest] = {}
        self.queue = RequestQueue(parts.metrics, self._forget, settings.deadlines.pair_s)
        self.rooms: dict[int, DecodeRequest] = {}
        """By room id, the latest attempt at it."""
        self.quarantine = Quarantine()
        self.receiver: DecodeRoomManager | None = None
        self._settings = settings
        self._parts = parts
        self._incarnation = incarnation
        self._allocator = parts.allocator
        self._submit_command = parts.submit_command
        self._metrics = parts.metrics
        self._draft_metrics: DraftMetrics | None = None
        if settings.draft_state is not None:
            self._draft_metrics = DraftMetrics(parts.metrics.registry, settings.spec_tokens, settings.draft_state)
        self._epochs = itertools.count(1)
        self._refusing: Failure | None = None

    def start(self) -> None:
        """Connects to the prefill nodes (without waiting for them)."""
        self._metrics.watch(
            self._allocator,
            queued=lambda: len(self.queue),
            running=lambda: len(self.works) - len(self.queue),
            peers=lambda: self.receiver.peers.n_registered if self.receiver else 0,
            quarantine_s=lambda: self.quarantine.oldest_s(time.monotonic()),
        )
        if self._settings.prefill is not None:
            self.receiver = DecodeRoomManager(
                self, self._settings, self._parts, self._incarnation, self._settings.prefill
            )
            self.receiver.start()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What the requests cannot live without."""
        return self.receiver.peers.tasks if self.receiver is not None else []

    async def close(self) -> None:
        """Closes every connection and transport session; the requests should have been given up before."""
        if self.receiver is not None:
            await self.receiver.close()

    def drain(self, failure: Failure) -> None:
        """Refuses every request that is still to come or has no room yet; the others go on."""
        self._refusing = failure
        self.queue.fail((work, failure) for work in self.queue)

    def refuse_all(self, failure: Failure) -> None:
        """Gives up every request, and every request that is still to come."""
        self._refusing = failure
        for work in list(self.works.values()):
            self._drop(work, failure)

    def engine_died(self, failure: Failure) -> None:
        """No engine event will come any more: every client is told."""
        self._refusing = failure
        for work in list(self.works.values()):
            work.generation.fail(RequestFailed(failure))

    # --- admission ----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, room: int | None = None) -> NodeGeneration:
        """Admits a request; ``room`` None draws one, if the request does not name one.

        Raises :class:`RequestFailed` at once for what cannot be served.
        """
        self.check_serving()
        link = link_of(self.receiver, request.routed) if request.routed is not None else None
        check_request(
            request,
            max_context=self._settings.max_context,
            vocab_size=self._parts.tokenizer.vocab_size,
            spec_tokens=self._settings.spec_tokens,
            allocator=self._allocator,
        )
        room_id = choose_room(request, room, self.rooms)
        if len(self.queue) >= self._settings.max_queue:
            reason = f"{len(self.queue)} requests wait for a slot and pages already"
            raise RequestFailed(Failure("overloaded", reason))
        generation = NodeGeneration(
            lambda: self._abort(room_id),
            room=room_id if self.receiver is not None else None,
            on_end=lambda outcome: self._log_end(room_id, outcome),
        )
        work = DecodeRequest(self._new_key(room_id), with_seed(request), generation, time.monotonic(), link=link)
        if link is not None:
            work.retries_left = 0  # the router tries another prefill node itself, with another room
        self._enter(work)
        self.queue.put(work)
        self._parts.faults.entered("waiting")
        if link is not None:
            self._parts.faults.entered("pair")
        self._admit()
        return generation

    def _new_key(self, room: int) -> RoomKey:
        return RoomKey(room, next(self._epochs), self._incarnation)

    def _enter(self, work: DecodeRequest) -> None:
        self.works[work.key] = self.rooms[work.key.room] = work

    def _log_end(self, room: int, outcome: str) -> None:
        if (work := self.rooms.get(room)) is not None:
            work.end(outcome, time.monotonic()).log()

    def check_serving(self) -> None:
        """Raises :class:`RequestFailed` (503) with the reason if no request can be served now."""
        if self._refusing is not None:
            raise RequestFailed(self._refusing)
        if self.receiver is not None and not self.receiver.peers.has_any():
            raise RequestFailed(Failure("no_prefill", self.receiver.peers.why_none()))

    def _admit(self) -> None:
        """Gives the head of the queue a slot and pages, again and again while there are any."""
        for work in self.queue if self._refusing is None else ():
            if work not in self.queue:
                continue  # it ended while one before it began
            if not self.queue.may_have_memory(work):
                continue  # its prefill node has not its half yet, and may never have it
            link = self._link_for(work)
            if self.receiver is not None and link is None:
                continue  # its prefill node registers anew; the others need not wait for that
            placement = self._allocator.reserve(work.key, tokens_held(work.request, self._settings.spec_tokens))
            if placement is None:
                return
            self.queue.take(work)
            self._parts.arena.owners.stamp(placement, work.key.owner)
            try:
                self._start(work, placement, link)
            except Exception as error:
                log.exception("%s could not be started", work.key)
                work.generation.fail(RequestFailed(internal_error("decode", error)))
                self._submit_command(Scrub(work.key, placement))

    def _start(self, work: DecodeRequest, placement: Placement, link: PrefillLink | None) -> None:
        work.placement = placement
        work.times.opened = time.monotonic()
        if self.receiver is not None and link is not None:
            self.receiver.open(work, placement, link)
        else:
            self._allocator.commit(work.key)
            self._submit_command(Generate(work.key, work.request, placement))

    def _link_for(self, work: DecodeRequest) -> PrefillLink | None:
        """The prefill node that computes the prompt; None if there is none now."""
        if work.request.routed is not None and work.link is not None:
            return work.link if work.link.registered else None
        return self.receiver.peers.pick(work.avoids) if self.receiver is not None else None

    def _forget(self, work: DecodeRequest) -> None:
        self.works.pop(work.key, None)
        if self.rooms.get(work.key.room) is work:
            del self.rooms[work.key.room]

    def _abort(self, room: int) -> None:
        if (work := self.rooms.get(room)) is not None:
            self._drop(work, Failure("aborted", "the client aborted the request"))

    def _drop(self, work: DecodeRequest, failure: Failure) -> None:
        """Ends a request wherever it is: in the queue, in its room, or in the engine."""
        if work in self.queue:
            self._end_generation(work, failure)
            self.queue.drop(work, failure.reason)
        elif work.room is not None and work.room.active and self.receiver is not None:
            self.receiver.give_up(work, failure)
        elif not work.generation.ended:
            self._submit_command(Cancel(work.key))
            if failure.code != "aborted":
                work.generation.fail(RequestFailed(failure))

    def _end_generation(self, work: DecodeRequest, failure: Failure) -> None:
        if failure.code == "aborted":
            work.generation.finish(FinishReason.ABORT)
        else:
            work.generation.fail(RequestFailed(failure))

    # --- RoomOwner ----------------------------------------------------------------------------------------------------

    def room_committed(self, work: DecodeRequest, done: Done, first: TokenLogprob) -> None:
        if work.placement is None or work.link is None:
            raise RuntimeError(f"{work.key} was committed without memory or peer")
        self._allocator.commit(work.key)
        nbytes = {sent.component: sent.nbytes for sent in done.sent}
        draft_state = self._settings.draft_state
        work.generation.set_route(RouteInfo(work.link.address, work.key.room, nbytes, draft_state, work.n_retries))
        owner = None if Check.STAMP in work.skipped else work.key.owner
        self._submit_command(Resume(work.key, work.request, work.placement, first, owner))
        work.resumed = True
        work.times.decoding, work.times.at_prefill = time.monotonic(), done.timings

    def room_failed(self, work: DecodeRequest, failure: Failure) -> None:
        log.warning("%s (%s) failed: %s: %s", work.key, work.request.request_id, failure.code, failure.reason)
        self._allocator.quarantine(work.key)
        self.quarantine.enter(work.key, failure, work.link.address if work.link else "", time.monotonic())
        if self._may_retry(work, failure):
            again = work.next_attempt(self._new_key(work.key.room), failure)
            log.info("%s is tried again as epoch %d", work.key, again.key.epoch)
            self._metrics.retried(failure.code)
            self._enter(again)
            self.queue.put_first(again)
            self._admit()
        else:
            self._end_generation(work, failure)

    def _may_retry(self, work: DecodeRequest, failure: Failure) -> bool:
        """Whether another prefill node is asked; what the failed attempt held stays in quarantine, under its epoch."""
        if self._refusing is not None or self.receiver is None or work.link is None:
            return False
        return work.may_be_retried(failure) and self.receiver.peers.pick((*work.avoids, work.link)) is not None

    def room_broken(self, work: DecodeRequest, error: Exception) -> None:
        """Something here failed after the room was over or committed; of a committed one the engine may have begun."""
        work.generation.fail(RequestFailed(internal_error("decode", error)))
        if work.resumed:
            self._submit_command(Cancel(work.key))
        elif work.room is not None and work.room.phase is DecodePhase.COMMITTED:
            self.room_free(work)

    def room_free(self, work: DecodeRequest) -> None:
        if work.placement is not None:
            self._submit_command(Scrub(work.key, work.placement))

    def request_arrived(self, key: RoomKey) -> bool:
        is_waiting = self.queue.request_arrived(key)
        self._admit()
        return is_waiting

    def room_refused(self, key: RoomKey, failure: Failure) -> bool:
        return self.queue.refuse(key, failure)

    def peers_changed(self) -> None:
        if self.receiver is not None:
            self.queue.fail_hopeless(self.receiver.peers)
        self.queue.tell()
        self._admit()

    # --- engine -------------------------------------------------------------------------------------------------------

    def on_engine_event(self, event: Event) -> None:
        """Takes one of the engine's events about a request (in the event loop)."""
        self.queue.is_moving()
        key = getattr(event, "key", None)
        work = self.works.get(key) if isinstance(key, RoomKey) else None
        if work is None:
            return
        try:
            self._tell_client(work, event)
        except Exception as error:
            log.exception("%s failed on %s", work.key, type(event).__name__)
            work.generation.fail(RequestFailed(internal_error("decode", error)))
            self._submit_command(Cancel(work.key))
        if isinstance(event, Finished | ComputeFailed | Scrubbed):
            self._release(work)

    def _tell_client(self, work: DecodeRequest, event: Event) -> None:
        match event:
            case Output():
                work.generation.set_route(self._local_route())
                if not work.n_generated:
                    self._parts.faults.entered("decode")
                    work.times.decoding = work.times.decoding or time.monotonic()
                self._count_step(work, event.output)
                work.generation.put(event.output)
            case Finished():
                work.generation.set_route(self._local_route())
                work.generation.finish(event.reason)
            case ComputeFailed():
                work.generation.fail(RequestFailed(event.failure))
            case _:
                pass

    def _local_route(self) -> RouteInfo:
        return RouteInfo("local", None, draft_state=self._settings.draft_state)

    def _count_step(self, work: DecodeRequest, output: TokenOutput) -> None:
        if self._draft_metrics is not None:
            self._draft_metrics.step(output, work.n_generated)
        work.n_generated += len(output.token_ids)

    def _release(self, work: DecodeRequest) -> None:
        if work.placement is not None:
            self._parts.arena.owners.clear(work.placement, work.key.owner)
        if self._allocator.state_of(work.key) is not ItemState.FREE:
            self._allocator.release(work.key)
        self.quarantine.leave(work.key)
        self._forget(work)
        self._admit()

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self.receiver is not None:
            self.receiver.tick()
            self.queue.fail_hopeless(self.receiver.peers)
        self.queue.tick(self._settings.deadlines.admission_s)
        self._admit()
        self.quarantine.warn(time.monotonic())
