"""What decode nodes say to the prefill node: which rooms are taken, and which are refused at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from server.engine.request import GenerationRequest
from server.node.parts import NodeParts, NodeSettings
from server.prefill.desk import RoomDesk
from server.prefill.failures import broken
from server.prefill.peers import PeerSender
from server.prefill.work import RoomWork, n_tokens_of, read_request
from server.transfer.bootstrap import DecodePeer
from server.transfer.prefill_room import PrefillRoom, failed_message
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
from server.transfer.rooms import Failure, GivenUp, RoomKey

log = logging.getLogger(__name__)


class Reception:
    """The :class:`~server.transfer.bootstrap.BootstrapHandler`: takes rooms on for ``desk`` and hands it the rest.

    ``send`` posts a message to a decode node.
    """

    def __init__(
        self,
        desk: RoomDesk,
        settings: NodeSettings,
        parts: NodeParts,
        send: Callable[[DecodePeer, AnyMessage], None],
    ) -> None:
        self._desk = desk
        self._send = send
        self._metrics = parts.metrics
        self._faults = parts.faults
        self._deadlines = settings.deadlines
        self._max_queue = settings.max_queue

    def on_registered(self, peer: DecodePeer) -> None:
        self._desk.meet(peer)

    def on_lost(self, peer: DecodePeer, failure: Failure) -> None:
        self._desk.part(peer, failure)

    def on_message(self, peer: DecodePeer, message: PeerMessage) -> None:
        target = self._desk.targets[peer]
        match message:
            case Probe() if self._desk.refusing is not None:
                self._desk.probes.refuse(target, message, self._desk.refusing.reason)
            case Probe():
                self._desk.probes.start(target, message)
            case Reserve():
                try:
                    self._on_reserve(target, message)
                except Exception as error:
                    log.exception("a Reserve of %s could not be handled", peer)
                    self._send(peer, failed_message(message, broken(error), Writes.SETTLING))
            case Waiting():
                self._on_waiting(peer, message)
            case Abort() | Committed() | Rejected():
                work = self._desk.works.get(RoomKey(message.room, message.epoch, message.decode))
                if work is not None:
                    self._desk.step(work, message)
                elif isinstance(message, Abort):
                    self._on_abort_of_unknown(peer, message)
            case _:
                self._metrics.dropped("direction")

    def _on_waiting(self, peer: DecodePeer, waiting: Waiting) -> None:
        """A room that is over here, or will never be taken, is answered so again and again: the answer may be lost."""
        desk, key = self._desk, RoomKey(waiting.room, waiting.epoch, waiting.decode)
        stone = desk.tombstones.refuses(key)
        if key in desk.works:
            return  # a copy from before the room was reserved
        if stone is not None:
            self._send(peer, failed_message(waiting, stone.failure or _over(key), Writes.SETTLING))
        elif desk.refusing is not None:
            desk.refuse_waiting(waiting, desk.refusing)
        else:
            desk.pairing.heard(waiting)

    def _on_reserve(self, target: PeerSender, reserve: Reserve) -> None:
        key = RoomKey(reserve.room, reserve.epoch, reserve.decode)
        if key in self._desk.works:
            self._desk.step(self._desk.works[key], reserve)
            return
        stone = self._desk.tombstones.refuses(key)
        if stone is not None:
            failure = stone.failure or _over(key)
            writes = Writes.SETTLING if self._desk.tombstones.clean(key) else Writes.UNKNOWN
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
        self._desk.works[key] = work
        self._faults.entered(room.phase)
        self._desk.step(work, reserve if failure_at_once is None else GivenUp(failure_at_once))
        if isinstance(reserve.request, RoutedRequest):
            self._desk.pairing.reserved(work)
        elif failure_at_once is None:
            self._desk.enqueue(work)

    def _check(self, target: PeerSender, reserve: Reserve, request: GenerationRequest, n: int) -> Failure | None:
        """Why this node will never compute ``reserve`` with its ``n`` tokens, or None."""
        if self._desk.refusing is not None:
            return self._desk.refusing
        if self._desk.n_waiting >= self._max_queue:
            return Failure("overloaded", f"{self._desk.n_waiting} rooms wait for the prefill node already", 503)
        if any(work.room.key.room == reserve.room for work in self._desk.rooms_of(target) if work.room.active):
            return Failure("duplicate_room", f"room {reserve.room} is under way in another epoch", 409)
        return self._desk.memory.refuses(target.peer, reserve, request, n)

    def _on_abort_of_unknown(self, peer: DecodePeer, abort: Abort) -> None:
        key = RoomKey(abort.room, abort.epoch, abort.decode)
        failure = Failure("aborted", abort.reason, 499)
        self._desk.pairing.given_up(key, failure)
        if self._desk.tombstones.clean(key):
            self._desk.tombstones.bury(key, failure, clean=True)
            self._send(peer, Quiesced(**ids_of(abort)))
        else:
            self._send(peer, failed_message(abort, failure, Writes.UNKNOWN))


def _over(key: RoomKey) -> Failure:
    return Failure("room_over", f"{key} is over already", 409)
