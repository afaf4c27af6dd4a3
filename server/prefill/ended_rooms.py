"""Answers about rooms that are over here, given again and again: each of them may be lost."""

from __future__ import annotations

from server.failure import Failure
from server.prefill.decode_peer import DecodePeer
from server.prefill.room import failed_message
from server.transfer.protocol import Abort, Quiesced, Reserve, Waiting, Writes, ids_of
from server.transfer.rooms import RoomKey, Tombstones


def answer_if_over(peer: DecodePeer, message: Reserve | Waiting, tombstones: Tombstones) -> bool:
    """Whether the room of ``message`` is over. If so, ``peer`` hears why."""
    key = RoomKey.of(message)
    stone = tombstones.refuses(key)
    if stone is None:
        return False
    failure = stone.failure or Failure("room_over", f"{key} is over already")
    peer.send(failed_message(message, failure, Writes.SETTLING if tombstones.clean(key) else Writes.UNKNOWN))
    return True


def answer_abort(peer: DecodePeer, abort: Abort, failure: Failure, tombstones: Tombstones) -> None:
    """``peer`` gives a room up, with ``failure``, that is not here: it never was, or it is over."""
    key = RoomKey.of(abort)
    if tombstones.clean(key):
        tombstones.add(key, failure, clean=True)
        peer.send(Quiesced(**ids_of(abort)))
    else:
        peer.send(failed_message(abort, failure, Writes.UNKNOWN))
