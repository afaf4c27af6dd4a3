"""Requests whose prefill node a router chose, while they have no memory here.

The router sent the prefill node the same request. Until that has come there, the room may never come to anything, so it
gets no memory here. The prefill node must know that the room is alive, and learn at once when it is not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.decode.prefill_link import PrefillLink
from server.decode.request import DecodeRequest
from server.decode.room_manager import DecodeRoomManager
from server.engine.request import RoutedRoom
from server.failure import Failure, RequestFailed
from server.transfer.addresses import split_address
from server.transfer.protocol import Abort, Registration, Waiting, clip, room_ids
from server.transfer.rooms import RoomKey

TELL_S = 1.0
"""A sign of life of every waiting room this often."""
_LOCALHOST = "localhost"


def link_of(receiver: DecodeRoomManager | None, named: RoutedRoom) -> PrefillLink:
    """The connection to the prefill node that a router named.

    Raises :class:`RequestFailed`: 503 if this decode node does not know it or is not registered with it, so that the
    router tries another; 400 if it uses none (``receiver`` None).
    """
    if receiver is None:
        message = "this node computes prompts itself (--local-prefill): it has no rooms with a prefill node"
        raise RequestFailed(Failure("wrong_role", message))
    wanted = _normal(named.address)
    for link in receiver.links:
        if _normal(link.address) == wanted:
            if not (link.registered or link.coming_back):
                raise RequestFailed(Failure("no_prefill", f"prefill {link.address}: {link.reason}"))
            return link
    known = ", ".join(link.address for link in receiver.links)
    message = f"prefill {named.address} is not one of this decode node's, which are {known}: add it with --prefill"
    raise RequestFailed(Failure("unknown_prefill", message))


def _normal(address: str) -> tuple[str, int]:
    """The same for every spelling of an address; a name stays a name."""
    host, port = split_address(address.lower())
    host = "127.0.0.1" if host == _LOCALHOST else host.strip("[]")
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return host, port


@dataclass
class _Told:
    """What the prefill node was told of a room in ``registration``: first at ``since``, last at ``at``.

    ``is_paired``: it has said that it has its half of the room.
    """

    registration: Registration
    since: float
    at: float
    is_paired: bool = False


class RoutedRooms:
    """Tells prefill nodes of the named rooms that wait here.

    Seconds by ``clock``; one that stays without its other half for ``pair_s`` ends.
    """

    def __init__(self, pair_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pair_s = pair_s
        self._clock = clock
        self._told: dict[RoomKey, _Told] = {}

    def tick(self, queue: Iterable[DecodeRequest]) -> list[tuple[DecodeRequest, Failure]]:
        """Says ``Waiting`` where it is due. Returns the rooms that can come to nothing, with the reason."""
        now, hopeless = self._clock(), []
        for work in queue:
            if work.link is not None and work.request.routed is not None:
                failure = self._tell(work.key, work.link, now)
                if failure is not None:
                    hopeless.append((work, failure))
        return hopeless

    def _tell(self, key: RoomKey, link: PrefillLink, now: float) -> Failure | None:
        told, registration = self._told.get(key), link.registration
        if registration is None:
            is_lost = not link.coming_back
            return Failure("no_prefill", f"prefill {link.address}: {link.reason}") if is_lost else None
        if told is not None and told.registration.prefill != registration.prefill:
            return Failure("peer_lost", f"prefill {link.address} has restarted")
        if told is None or told.registration != registration:
            told = self._told[key] = _Told(registration, now, float("-inf"))
        waited_s = now - told.since
        if not told.is_paired and waited_s > self._pair_s:
            reason = f"phase pair: no request for room {key.room} was reported by prefill {link.address} for "
            reason += f"{waited_s:.1f} s (deadline {self._pair_s:g} s)"
            return Failure("deadline", reason)
        if now - told.at >= TELL_S:
            told.at = now
            link.send(Waiting(**room_ids(registration, key.room, key.epoch)))
        return None

    def request_arrived(self, key: RoomKey) -> bool:
        """The prefill node has its half of the room; False if that does not wait here."""
        told = self._told.get(key)
        if told is not None:
            told.is_paired = True
        return told is not None

    def is_paired(self, work: DecodeRequest) -> bool:
        """Whether the prefill node has said so, in the registration that is valid now."""
        told = self._told.get(work.key)
        if told is None or work.link is None:
            return False
        return told.is_paired and told.registration == work.link.registration

    def opened(self, key: RoomKey) -> None:
        """The room waits no longer: a ``Reserve`` follows, or the prefill node said itself that it is over."""
        self._told.pop(key, None)

    def given_up(self, work: DecodeRequest, reason: str) -> None:
        """The room is over before it had memory."""
        told = self._told.pop(work.key, None)
        if told is not None and work.link is not None and work.link.registration == told.registration:
            ids = room_ids(told.registration, work.key.room, work.key.epoch)
            work.link.send(Abort(**ids, reason=clip(reason)))
