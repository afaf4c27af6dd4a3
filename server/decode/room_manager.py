"""The decode node's rooms and peers: feeds the room state machines, checks what arrived, and fences lost peers.

The :class:`RoomOwner` (the node) owns memory and clients; this file owns everything between ``Reserve`` and commit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict

from server.cache.layout import Placement
from server.decode.admission import wire_request
from server.decode.peer_pool import PeerPool
from server.decode.prefill_link import PrefillLink
from server.decode.probe import Prober
from server.decode.request import DecodeRequest, RoomOwner
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
    Verified,
    Verify,
)
from server.decode.settings import DecodeSettings
from server.decode.transport_sessions import TransportSessions
from server.decode.verify import Evidence, Proof, verify
from server.failure import Failure, FailureKind, internal_error
from server.faults.messages import Outbox
from server.faults.rows import RowDamage
from server.faults.spec import STATE, skipped_checks
from server.node.context import NodeContext
from server.threads import Threads
from server.transfer.manifest import Manifest, TransportIdentity, build_manifest
from server.transfer.protocol import (
    Abort,
    Committed,
    Done,
    Failed,
    PeerMessage,
    ProbeDone,
    Progress,
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
_VERIFIERS = 4
"""Rooms whose bytes are checked at the same time."""


class DecodeRoomManager:
    """All peers and all rooms that are not committed yet."""

    def __init__(
        self,
        owner: RoomOwner,
        settings: DecodeSettings,
        parts: NodeContext,
        incarnation: str,
        addresses: tuple[str, ...],
    ) -> None:
        deadlines = settings.deadlines
        outbox, numbers = Outbox(parts.faults), itertools.count(1)
        self.links = [
            PrefillLink(address, self, deadlines, parts.metrics, settings.guard, outbox, numbers)
            for address in addresses
        ]
        self.peers = PeerPool(self.links, self.outstanding)
        self._owner = owner
        self._arena = parts.arena
        self._incarnation = incarnation
        self._identity = parts.identity
        self._spec_tokens = settings.spec_tokens
        self._components = tuple(name for name in parts.arena.layout.names if name not in settings.own_components)
        self._sessions = TransportSessions(parts.make_transport, parts.arena)
        self._deadlines = deadlines
        self._metrics = parts.metrics
        self._faults = parts.faults
        self._damage = RowDamage(parts.arena)
        self._prober = Prober(parts.arena, deadlines)
        self._works: dict[RoomKey, DecodeRequest] = {}
        self._committed: OrderedDict[RoomKey, None] = OrderedDict()
        self._proofs: dict[RoomKey, Proof] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._verifiers = Threads("verify", _VERIFIERS)

    def start(self) -> None:
        for link in self.links:
            link.start()

    async def close(self) -> None:
        """Ends the connections and the transport sessions; rooms should have been given up before."""
        for link in self.links:
            await link.close()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._sessions.close()
        self._verifiers.close()

    def outstanding(self, link: PrefillLink) -> int:
        return sum(work.link is link for work in self._works.values())

    async def ready(self) -> tuple[bool, str]:
        return await self._prober.ready(lambda: self.links)

    def open(self, work: DecodeRequest, placement: Placement, link: PrefillLink) -> None:
        """Starts the room of ``work``: its memory is reserved and ``link`` will compute its prompt."""
        registration = link.registration
        if registration is None:
            raise RuntimeError(f"prefill {link.address} is not registered")
        n_prompt_pages = -(-len(work.request.prompt_ids) // self._arena.layout.page_size)
        deadlines = self._deadlines
        reserve = Reserve(
            **room_ids(registration, work.key.room, work.key.epoch),
            slot=placement.slot,
            pages=placement.pages[:n_prompt_pages],
            components=self._components,
            request=wire_request(work.request),
            silence_s=min(deadlines.queued_s, deadlines.prefill_s, deadlines.transfer_s),
        )
        work.placement, work.link = placement, link
        work.room = DecodeRoom(reserve, deadlines, time.monotonic())
        self._works[work.key] = work
        self._faults.entered(work.room.phase)
        self._step(work, Opened())

    def give_up(self, work: DecodeRequest, failure: Failure) -> None:
        self._step(work, GivenUp(failure))

    def tick(self) -> None:
        for work in list(self._works.values()):
            self._step(work, Tick())

    # --- PrefillLinkHost -------------------------------------------------------------------------------------------

    async def open_session(self, link: PrefillLink) -> Manifest:
        engine = await self._sessions.open(link.address)
        self._on_fenced(link)
        return build_manifest(
            "decode",
            self._incarnation,
            self._identity,
            TransportIdentity.of(engine),
            self._arena.layout,
            self._arena.ptr,
            spec_tokens=self._spec_tokens,
            components=self._components,
            session=engine.session,
        )

    async def fence(self, link: PrefillLink) -> None:
        await self._sessions.fence(link.address)
        self._metrics.fenced()
        self._on_fenced(link)

    def on_registered(self, link: PrefillLink) -> None:
        self.peers.is_new(link)
        self._owner.peers_changed()

    def on_lost(self, link: PrefillLink, failure: Failure) -> None:
        self._prober.on_lost(link, failure)
        for work in self._rooms_of(link):
            self._step(work, PeerLost(failure))
        self._owner.peers_changed()

    def on_message(self, link: PrefillLink, message: PeerMessage) -> None:
        if isinstance(message, ProbeDone):
            self._prober.on_done(message)
        elif isinstance(message, RequestArrived):
            self._on_request_arrived(link, message)
        elif isinstance(message, Reserved | Progress | Done | Failed | Quiesced):
            self._on_room_message(link, message)

    def _on_request_arrived(self, link: PrefillLink, message: RequestArrived) -> None:
        """A copy may come after the room was opened, or was over."""
        key = RoomKey(message.room, message.epoch, message.decode)
        if key not in self._works and key not in self._committed and not self._owner.request_arrived(key):
            self._metrics.dropped("stale")
            link.send(Abort(**ids_of(message), reason=_UNKNOWN))

    def _on_room_message(self, link: PrefillLink, message: Reserved | Progress | Done | Failed | Quiesced) -> None:
        key = RoomKey(message.room, message.epoch, message.decode)
        work = self._works.get(key)
        if isinstance(message, Failed) and message.kind is FailureKind.UNAVAILABLE:
            self.peers.is_unwilling(link)
        if work is not None and work.link is link:
            self._step(work, message)
        elif key in self._committed:
            if isinstance(message, Done):
                link.send(Committed(**ids_of(message)))
        elif not isinstance(message, Failed) or not self._owner.room_refused(key, message.failure):
            self._metrics.dropped("stale")
            if isinstance(message, Progress | Done | Failed):
                link.send(Abort(**ids_of(message), reason=_UNKNOWN))

    # --- rooms --------------------------------------------------------------------------------------------------------

    def _rooms_of(self, link: PrefillLink) -> list[DecodeRequest]:
        return [work for work in self._works.values() if work.link is link]

    def _on_fenced(self, link: PrefillLink) -> None:
        for work in self._rooms_of(link):
            self._step(work, Fenced())

    def _step(self, work: DecodeRequest, event: DecodeEvent) -> None:
        """Feeds one event to one room. An exception fails this room only, and what else was to be done is done."""
        room = work.room
        if room is None:
            return
        phase = room.phase
        try:
            actions = room.handle(event, time.monotonic())
            if room.phase is not phase:
                self._faults.entered(room.phase)
        except Exception as error:
            log.exception("%s failed on %s", work.key, type(event).__name__)
            self._on_broken(work, room, event, error)
            return
        for action in actions:
            try:
                self._perform(work, room, action)
            except Exception as error:
                log.exception("%s failed on %s", work.key, type(action).__name__)
                self._on_broken(work, room, action, error)

    def _on_broken(
        self, work: DecodeRequest, room: DecodeRoom, at: DecodeEvent | DecodeAction, error: Exception
    ) -> None:
        if room.active and not isinstance(at, GivenUp):
            self._step(work, GivenUp(internal_error("decode", error)))
        else:
            self._owner.room_broken(work, error)

    def _perform(self, work: DecodeRequest, room: DecodeRoom, action: DecodeAction) -> None:
        match action:
            case Send():
                if work.link is not None:
                    work.link.send(action.message)
            case Verify():
                task = asyncio.create_task(self._verify(work, action.done))
                self._checks.add(task)
                task.add_done_callback(self._checks.discard)
            case Commit():
                self._commit(work, action.done)
            case FailClient():
                self._owner.room_failed(work, action.failure)
            case Free():
                self._owner.room_free(work)
            case FencePeer():
                if work.link is not None:
                    work.link.lose(Failure("fenced", f"transport session fenced: {action.reason}"))
            case Forget():
                self._forget(work.key, room, action)

    async def _verify(self, work: DecodeRequest, done: Done) -> None:
        placement = work.placement
        try:
            if placement is None:
                raise RuntimeError("the room has no memory")
            found = Evidence(self._arena, placement, self._components, work.key, work.request, done)
            if self._faults.is_on:
                await self._strike(work, placement, found.n)
            proof = await self._verifiers.run(verify, found, work.skipped)
        except Exception as error:
            log.exception("%s could not be checked", work.key)
            proof = Proof(Failure("internal_error", f"what arrived could not be checked: {error!r}"))
        if proof.failure is not None:
            self._metrics.check_failed(proof.failure)
        self._proofs[work.key] = proof
        self._step(work, Verified(proof.failure))
        self._proofs.pop(work.key, None)

    async def _strike(self, work: DecodeRequest, placement: Placement, n: int) -> None:
        """Fault injection: damages what has arrived, and says which checks are not made."""
        struck = self._faults.strike(str(work.key))
        work.skipped = skipped_checks(struck)
        for damage in await self._damage.make([fault for fault in struck if fault.kind in STATE], n, placement):
            damage.apply(self._arena)

    def _commit(self, work: DecodeRequest, done: Done) -> None:
        first = self._proofs[work.key].first
        if first is None:
            raise RuntimeError(f"{work.key} was committed without a first token")
        self._metrics.transferred({sent.component: sent.nbytes for sent in done.sent}, done.pieces)
        self._owner.room_committed(work, done, first)

    def _forget(self, key: RoomKey, room: DecodeRoom, action: Forget) -> None:
        del self._works[key]
        self._metrics.room_ended(action.outcome, action.reason)
        for phase, seconds in room.phase_s.items():
            self._metrics.phase(phase, seconds)
        if room.phase is DecodePhase.COMMITTED:
            self._committed[key] = None
            while len(self._committed) > _REMEMBERED_COMMITS:
                self._committed.popitem(last=False)
