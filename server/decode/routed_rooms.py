"""Requests whose prefill node a router chose, while they have no memory here.

The router sent the prefill node the same request. Until that has come there, the room may never come to anything, so it
gets no memory here. The prefill node must know that the room is alive, and learn at once when it is not.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from server.decode.prefill_link import PrefillLink
from server.decode.request import DecodeRequest
from server.engine.request import RoutedRoom
from server.failure import Failure, RequestFailed
from server.transfer.addresses import split_address
from server.transfer.protocol import Abort, Registration, Waiting, clip, room_ids
from server.transfer.rooms import RoomKey

REPEAT_S = 1.0
"""A sign of life of every waiting room this often."""
_LOCALHOST = "localhost"


def link_of(links: Sequence[PrefillLink], routed: RoutedRoom) -> PrefillLink:
    """The connection to the prefill node that a router chose.

    Raises :class:`RequestFailed` (503) if it is none of ``links``, or not registered, so that the router tries another.
    """
    wanted = _normal(routed.address)
    for link in links:
        if _normal(link.address) == wanted:
            if not (link.registered or link.coming_back):
                raise RequestFailed(Failure("no_prefill", f"prefill {link.address}: {link.reason}"))
            return link
    known = ", ".join(link.address for link in links)
    message = f"prefill {routed.address} is not one of this decode node's, which are {known}: add it with --prefill"
    raise RequestFailed(Failure("unknown_prefill", message))


def _normal(address: str) -> tuple[str, int]:
    """The same for every spelling of an address; a name stays a name."""
    host, port = split_address(address.lower())
    host = "127.0.0.1" if host == _LOCALHOST else host.strip("[]")
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return host, port


@dataclass
class _Announced:
    """A room of which the prefill node knows in ``registration``: since ``since``, last reminded at ``at``.

    ``is_paired``: it has said that it has its half of the room.
    """

    registration: Registration
    since: float
    at: float
    is_paired: bool = False


class RoutedRooms:
    """Announces the rooms that wait here to their prefill nodes.

    Seconds by ``clock``; one that stays without its other half for ``pair_s`` ends.
    """

    def __init__(self, pair_s: float, clock: Callable[[], float]) -> None:
        self._pair_s = pair_s
        self._clock = clock
        self._announced: dict[RoomKey, _Announced] = {}

    def tick(self, queue: Iterable[DecodeRequest]) -> list[tuple[DecodeRequest, Failure]]:
        """Says ``Waiting`` where it is due. Returns the rooms that can come to nothing, with the reason."""
        now, hopeless = self._clock(), []
        for req in queue:
            if req.link is not None and req.request.routed is not None:
                failure = self._announce(req.key, req.link, now)
                if failure is not None:
                    hopeless.append((req, failure))
        return hopeless

    def _announce(self, key: RoomKey, link: PrefillLink, now: float) -> Failure | None:
        known, registration = self._announced.get(key), link.registration
        if registration is None:
            is_lost = not link.coming_back
            return Failure("no_prefill", f"prefill {link.address}: {link.reason}") if is_lost else None
        if known is not None and known.registration.prefill != registration.prefill:
            return Failure("peer_lost", f"prefill {link.address} has restarted")
        if known is None or known.registration != registration:
            known = self._announced[key] = _Announced(registration, now, float("-inf"))
        waited_s = now - known.since
        if not known.is_paired and waited_s > self._pair_s:
            reason = f"phase pair: no request for room {key.room} was reported by prefill {link.address} for "
            reason += f"{waited_s:.1f} s (deadline {self._pair_s:g} s)"
            return Failure("deadline", reason)
        if now - known.at >= REPEAT_S:
            known.at = now
            link.send(Waiting(**room_ids(registration, key.room, key.epoch)))
        return None

    def request_arrived(self, key: RoomKey) -> bool:
        """The prefill node has its half of the room; False if that does not wait here."""
        known = self._announced.get(key)
        if known is not None:
            known.is_paired = True
        return known is not None

    def is_paired(self, req: DecodeRequest) -> bool:
        """Whether the prefill node has said so, in the registration that is valid now."""
        known = self._announced.get(req.key)
        if known is None or req.link is None:
            return False
        return known.is_paired and known.registration == req.link.registration

    def opened(self, key: RoomKey) -> None:
        """The room waits no longer: a ``Reserve`` follows, or the prefill node said itself that it is over."""
        self._announced.pop(key, None)

    def given_up(self, req: DecodeRequest, reason: str) -> None:
        """The room is over before it had memory."""
        known = self._announced.pop(req.key, None)
        if known is not None and req.link is not None and req.link.registration == known.registration:
            ids = room_ids(known.registration, req.key.room, req.key.epoch)
            req.link.send(Abort(**ids, reason=clip(reason)))
