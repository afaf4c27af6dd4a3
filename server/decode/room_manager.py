"""The decode node's rooms: everything between ``Reserve`` and commit.

Feeds the room state machines (:mod:`.room`) and checks what arrived. Memory and clients are the
:class:`~.request_manager.RequestManager`'s.

All waits are measured by the context's ``clock`` or by the event loop, and what leaves it is the ``make_dialer`` and
the loop's threads. So a simulation can run the real managers on a loop with virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from server.cache.specs import HANDOFF
from server.decode.admission import wire_request
from server.decode.dialer import MakeDialer
from server.decode.peer_pool import PeerPool
from server.decode.prefill_link import LinkEvent, PeerRegistered, PrefillLink
from server.decode.request import DecodeRequest
from server.decode.room import (
    Commit,
    DecodeAction,
    DecodeEvent,
    DecodePhase,
    DecodeRoom,
    FailClient,
    Fenced,
    FencePeer,
    Free,
    Opened,
    Proof,
    RequestAction,
    Verified,
    Verify,
)
from server.decode.settings import DecodeSettings
from server.decode.verify import Evidence, Expected, verify
from server.engine.prompt_logprobs import row_nbytes
from server.failure import Failure, FailureKind, internal_error
from server.node.context import NodeContext
from server.telemetry.record import PhaseName
from server.threads import Threads
from server.transfer.checks import Check
from server.transfer.parts import PartsReceived
from server.transfer.protocol import (
    Abort,
    Committed,
    Done,
    Failed,
    Progress,
    PromptLogprobsPart,
    Quiesced,
    RequestArrived,
    Reserve,
    Reserved,
    ids_of,
    room_ids,
)
from server.transfer.rooms import Forget, GivenUp, PeerLost, RoomKey, Send, Tick

log = logging.getLogger(__name__)

_REMEMBERED_COMMITS = 4096
_UNKNOWN = "this decode node does not know the room"
_RECORDED_PHASES = {
    DecodePhase.QUEUED: PhaseName.PREFILL_QUEUE,
    DecodePhase.PREFILL: PhaseName.PREFILL,
    DecodePhase.TRANSFER: PhaseName.TRANSFER,
    DecodePhase.VERIFY: PhaseName.VERIFY,
    DecodePhase.COMMITTED: PhaseName.FIRST_TOKEN,
}
CHECKED_AT_ONCE_NBYTES = 1 << 20
"""A state of up to this size is checked in the event loop, which takes less time than the way to a thread and back. One
on a GPU is not: to read it is to wait for what is computed there.
"""
_VERIFIERS = 4
"""Rooms with a larger state that are checked at the same time."""


class DecodeRoomManager:
    """All rooms that are not committed yet, and the ``peers`` that they are with.

    ``on_action`` does what a room wants done with its request's memory and client. ``on_broken``: something failed here
    after the room was over or committed. ``on_waiting`` gets the prefill node's word on a room that has no memory yet:
    None if the router's request has come there, or why that has ended it; False if no such room waits.
    ``on_peers_changed``: a peer is registered, or no longer.
    """

    def __init__(
        self,
        settings: DecodeSettings,
        context: NodeContext,
        incarnation: str,
        *,
        make_dialer: MakeDialer | None,
        on_action: Callable[[DecodeRequest, RequestAction], None],
        on_broken: Callable[[DecodeRequest, Exception], None],
        on_waiting: Callable[[RoomKey, Failure | None], bool],
        on_peers_changed: Callable[[], None],
    ) -> None:
        self._deadlines = settings.deadlines
        self._arena = context.arena
        self._clock = context.clock
        self._metrics = context.metrics
        self._hooks = context.hooks
        self._on_action = on_action
        self._on_broken = on_broken
        self._on_waiting = on_waiting
        self._on_peers_changed = on_peers_changed
        self._reqs: dict[RoomKey, DecodeRequest] = {}
        self._committed: OrderedDict[RoomKey, None] = OrderedDict()
        self._checks: set[asyncio.Task[None]] = set()
        self._verifiers = Threads("verify", _VERIFIERS)
        self.peers = PeerPool(
            settings,
            context,
            incarnation,
            make_dialer=make_dialer,
            on_event=self._on_link_event,
            outstanding=lambda link: len(self._rooms_of(link)),
        )

    async def close(self) -> None:
        """Ends the connections and the transport sessions; rooms should have been given up before."""
        await self.peers.close()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self.peers.sessions.close()
        self._verifiers.close()

    def tick(self) -> None:
        for req in list(self._reqs.values()):
            self.step(req, Tick())

    # --- messages -----------------------------------------------------------------------------------------------------

    def _rooms_of(self, link: PrefillLink) -> list[DecodeRequest]:
        return [req for req in self._reqs.values() if req.link is link]

    def _on_link_event(self, link: PrefillLink, event: LinkEvent) -> None:
        match event:
            case PeerRegistered():
                self._on_peers_changed()
            case PeerLost():
                for req in self._rooms_of(link):
                    self.step(req, event)
                self._on_peers_changed()
            case Fenced():
                for req in self._rooms_of(link):
                    self.step(req, event)
            case RequestArrived():
                self._on_request_arrived(link, event)
            case Reserved() | Progress() | PromptLogprobsPart() | Done() | Failed() | Quiesced():
                self._on_room_message(link, event)
            case _:
                pass

    def _on_request_arrived(self, link: PrefillLink, message: RequestArrived) -> None:
        """A copy may come after the room was opened, or was over."""
        key = RoomKey.of(message)
        if key not in self._reqs and key not in self._committed and not self._on_waiting(key, None):
            self._metrics.dropped("stale")
            link.send(Abort(**ids_of(message), reason=_UNKNOWN))

    def _on_room_message(
        self, link: PrefillLink, message: Reserved | Progress | PromptLogprobsPart | Done | Failed | Quiesced
    ) -> None:
        key = RoomKey.of(message)
        req = self._reqs.get(key)
        if isinstance(message, Failed) and message.kind is FailureKind.UNAVAILABLE:
            self.peers.refused_room(link)
        if req is not None and req.link is link:
            room = req.room
            is_checked = isinstance(message, PromptLogprobsPart) and room is not None and room.active
            self.step(req, message)
            if is_checked and room is not None and room.failure is not None:
                self._metrics.check_failed(room.failure)
        elif key in self._committed:
            if isinstance(message, Done):
                link.send(Committed(**ids_of(message)))
        elif not isinstance(message, Failed) or not self._on_waiting(key, message.failure):
            self._metrics.dropped("stale")
            if isinstance(message, Progress | PromptLogprobsPart | Done | Failed):
                link.send(Abort(**ids_of(message), reason=_UNKNOWN))

    # --- rooms --------------------------------------------------------------------------------------------------------

    def open(self, req: DecodeRequest) -> None:
        """Opens the room of ``req``, which has memory and a link to the prefill node that will compute its prompt."""
        placement = req.placement
        registration = req.link.registration if req.link is not None else None
        if placement is None or registration is None:
            raise RuntimeError(f"{req.key} has no memory, or no prefill node that is registered")
        n_prompt_pages = -(-len(req.request.prompt_ids) // self._arena.layout.page_size)
        deadlines, components = self._deadlines, self.peers.components
        if not req.request.sampling.max_tokens:
            components = (HANDOFF,)  # nothing is decoded from the rest
        asked = wire_request(req.request, req.packed_prompt, req.sampling)
        offered = tuple(cached.page for cached in req.offered)
        req.expected = Expected.of(self._arena, placement, components, req.key, asked, offered)
        reserve = Reserve(
            **room_ids(registration, req.key.room, req.key.epoch),
            slot=placement.slot,
            pages=placement.pages[:n_prompt_pages],
            components=components,
            request=asked,
            silence_s=min(deadlines.queued_s, deadlines.prefill_s, deadlines.transfer_s),
            traceparent=req.record.traceparent,
            offered=b"".join(cached.digest for cached in req.offered),
        )
        n_top = req.sampling.prompt_logprobs
        n = len(req.request.prompt_ids)
        scores = None if n_top is None else PartsReceived(row_nbytes(n_top), first=1, stop=n)
        req.room = DecodeRoom(reserve, deadlines, self._clock(), scores)
        self._reqs[req.key] = req
        self._hooks.entered(req.room.phase)
        self.step(req, Opened())

    def step(self, req: DecodeRequest, event: DecodeEvent) -> None:
        """Feeds one event to one room. An exception fails this room only, and what else was to be done is done."""
        room = req.room
        if room is None:
            return
        phase, now = room.phase, self._clock()
        try:
            actions = room.handle(event, now)
            if room.phase is not phase:
                self._hooks.entered(room.phase)
                _note_phase(req, room, event, now)
        except Exception as error:
            log.exception("%s failed on %s", req.key, type(event).__name__)
            self._fail(req, room, event, error)
            return
        for action in actions:
            try:
                self.perform(req, room, action)
            except Exception as error:
                log.exception("%s failed on %s", req.key, type(action).__name__)
                self._fail(req, room, action, error)

    def _fail(self, req: DecodeRequest, room: DecodeRoom, at: DecodeEvent | DecodeAction, error: Exception) -> None:
        if isinstance(at, Verify):  # the room waits for a proof before it frees anything
            self._checked(req, _unchecked(error))
        elif room.active and not isinstance(at, GivenUp):
            self.step(req, GivenUp(internal_error("decode", error)))
        else:
            self._on_broken(req, error)

    def perform(self, req: DecodeRequest, room: DecodeRoom, action: DecodeAction) -> None:
        match action:
            case Send():
                if req.link is not None:
                    req.link.send(action.message)
            case Verify() if req.expected is not None:
                req.expected = expected = req.expected.settled(action.done.held)
                evidence = Evidence(expected, action.done, action.scores)
                self._hooks.received(req.key, expected.n, expected.placement, partial(self._check, req, evidence))
            case Commit():
                self._on_action(req, action)  # first of all: the engine can begin
                if req.link is not None:
                    self._metrics.transferred(req.link.address, action.done)
                    self._metrics.reused(action.done.n_reused)
                    self._metrics.held(req.link.address, sum(sent.held_nbytes for sent in action.done.sent))
            case FailClient() | Free():
                self._on_action(req, action)
            case FencePeer():
                if req.link is not None:
                    req.link.lose(Failure("fenced", f"transport session fenced: {action.reason}"))
            case Forget():
                self._forget(req.key, room, action)
            case _:
                raise RuntimeError(f"{req.key} asks for {action} without memory")

    def _check(self, req: DecodeRequest, evidence: Evidence, skipped: frozenset[Check]) -> None:
        req.skipped = skipped
        is_near = self._arena.device.type == "cpu"
        if evidence.expected.total_nbytes > CHECKED_AT_ONCE_NBYTES or not is_near:
            task = asyncio.create_task(self._check_in_thread(req, evidence))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)
            return
        self._checked(req, _proof(req, evidence))

    async def _check_in_thread(self, req: DecodeRequest, evidence: Evidence) -> None:
        try:
            proof = await self._verifiers.run(_proof, req, evidence)
        except Exception as error:  # there is no thread to be had
            log.exception("%s could not be checked", req.key)
            proof = _unchecked(error)
        self._checked(req, proof)

    def _checked(self, req: DecodeRequest, proof: Proof) -> None:
        if isinstance(proof, Failure):
            self._metrics.check_failed(proof)
        self.step(req, Verified(proof))

    def _forget(self, key: RoomKey, room: DecodeRoom, action: Forget) -> None:
        del self._reqs[key]
        self._metrics.room_ended(action.outcome, action.reason)
        for phase, seconds in room.phase_s.items():
            self._metrics.phase(phase, seconds)
        if room.phase is DecodePhase.COMMITTED:
            self._committed[key] = None
            while len(self._committed) > _REMEMBERED_COMMITS:
                self._committed.popitem(last=False)


def _note_phase(req: DecodeRequest, room: DecodeRoom, event: DecodeEvent, now: float) -> None:
    """A room has entered another phase: so does its record."""
    if isinstance(event, Done):
        req.record.join(event.timings, now)
    name = _RECORDED_PHASES.get(room.phase)
    if name is not None:
        req.record.enter(name, now)


def _proof(req: DecodeRequest, evidence: Evidence) -> Proof:
    try:
        return verify(evidence, req.skipped)
    except Exception as error:
        log.exception("%s could not be checked", req.key)
        return _unchecked(error)


def _unchecked(error: Exception) -> Failure:
    return Failure("internal_error", f"what arrived could not be checked: {error!r}")
