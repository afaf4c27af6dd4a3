"""What decode nodes say to the prefill node: which rooms are taken, and which are refused at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from server.engine.request import GenerationRequest
from server.failure import Failure, internal_error
from server.node.context import NodeContext, NodeSettings
from server.prefill.bootstrap import DecodePeer
from server.prefill.probe import PeerSender
from server.prefill.request import PrefillRequest, n_tokens_of, read_request
from server.prefill.room import PrefillRoom, failed_message
from server.prefill.room_manager import PrefillRoomManager
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
from server.transfer.rooms import GivenUp, RoomKey

log = logging.getLogger(__name__)


class Reception:
    """The :class:`~server.prefill.bootstrap.BootstrapHandler`: takes rooms on for ``manager`` and hands it the rest.

    ``send`` posts a message to a decode node.
    """

    def __init__(
        self,
        manager: PrefillRoomManager,
        settings: NodeSettings,
        parts: NodeContext,
        send: Callable[[DecodePeer, AnyMessage], None],
    ) -> None:
        self._manager = manager
        self._send = send
        self._metrics = parts.metrics
        self._faults = parts.faults
        self._deadlines = settings.deadlines
        self._max_queue = settings.max_queue

    def on_registered(self, peer: DecodePeer) -> None:
        self._manager.meet(peer)

    def on_lost(self, peer: DecodePeer, failure: Failure) -> None:
        self._manager.part(peer, failure)

    def on_message(self, peer: DecodePeer, message: PeerMessage) -> None:
        target = self._manager.targets[peer]
        match message:
            case Probe() if self._manager.refusing is not None:
                self._manager.probes.refuse(target, message, self._manager.refusing.reason)
            case Probe():
                self._manager.probes.start(target, message)
            case Reserve():
                try:
                    self._on_reserve(target, message)
                except Exception as error:
                    log.exception("a Reserve of %s could not be handled", peer)
                    self._send(peer, failed_message(message, internal_error("prefill", error), Writes.SETTLING))
            case Waiting():
                self._on_waiting(peer, message)
            case Abort() | Committed() | Rejected():
                work = self._manager.works.get(RoomKey(message.room, message.epoch, message.decode))
                if work is not None:
                    self._manager.step(work, message)
                elif isinstance(message, Abort):
                    self._on_abort_of_unknown(peer, message)
            case _:
                self._metrics.dropped("direction")

    def _on_waiting(self, peer: DecodePeer, waiting: Waiting) -> None:
        """A room that is over here, or will never be taken, is answered so again and again: the answer may be lost."""
        manager, key = self._manager, RoomKey(waiting.room, waiting.epoch, waiting.decode)
        stone = manager.tombstones.refuses(key)
        if key in manager.works:
            return  # a copy from before the room was reserved
        if stone is not None:
            self._send(peer, failed_message(waiting, stone.failure or _over(key), Writes.SETTLING))
        elif manager.refusing is not None:
            manager.refuse_waiting(waiting, manager.refusing)
        else:
            manager.routed_rooms.heard(waiting)

    def _on_reserve(self, target: PeerSender, reserve: Reserve) -> None:
        key = RoomKey(reserve.room, reserve.epoch, reserve.decode)
        if key in self._manager.works:
            self._manager.step(self._manager.works[key], reserve)
            return
        stone = self._manager.tombstones.refuses(key)
        if stone is not None:
            failure = stone.failure or _over(key)
            writes = Writes.SETTLING if self._manager.tombstones.clean(key) else Writes.UNKNOWN
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
        work = PrefillRequest(room, request, target)
        self._manager.works[key] = work
        self._faults.entered(room.phase)
        self._manager.step(work, reserve if failure_at_once is None else GivenUp(failure_at_once))
        if isinstance(reserve.request, RoutedRequest):
            self._manager.routed_rooms.reserved(work)
        elif failure_at_once is None:
            self._manager.enqueue(work)

    def _check(self, target: PeerSender, reserve: Reserve, request: GenerationRequest, n: int) -> Failure | None:
        """Why this node will never compute ``reserve`` with its ``n`` tokens, or None."""
        if self._manager.refusing is not None:
            return self._manager.refusing
        if self._manager.n_waiting >= self._max_queue:
            return Failure("overloaded", f"{self._manager.n_waiting} rooms wait for the prefill node already")
        if any(work.room.key.room == reserve.room for work in self._manager.rooms_of(target) if work.room.active):
            return Failure("duplicate_room", f"room {reserve.room} is under way in another epoch")
        return self._manager.memory.refuses(target.peer, reserve, request, n)

    def _on_abort_of_unknown(self, peer: DecodePeer, abort: Abort) -> None:
        key = RoomKey(abort.room, abort.epoch, abort.decode)
        failure = Failure("aborted", abort.reason)
        self._manager.routed_rooms.given_up(key, failure)
        if self._manager.tombstones.clean(key):
            self._manager.tombstones.bury(key, failure, clean=True)
            self._send(peer, Quiesced(**ids_of(abort)))
        else:
            self._send(peer, failed_message(abort, failure, Writes.UNKNOWN))


def _over(key: RoomKey) -> Failure:
    return Failure("room_over", f"{key} is over already")
