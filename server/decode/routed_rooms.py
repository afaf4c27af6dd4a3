"""Requests whose prefill node a router chose, while they have no memory here.

The router sent the prefill node the same request. Until that has come there, the room may never come to anything, so it
gets no memory here. The prefill node must know that the room is alive, and learn at once when it is not.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence

from server.decode.prefill_link import PrefillLink
from server.decode.request import Announced, DecodeRequest
from server.engine.request import RoutedRoom
from server.failure import Failure, RequestFailed
from server.transfer.addresses import split_address
from server.transfer.protocol import Abort, Waiting, clip, room_ids

REPEAT_S = 1.0
"""A sign of life of every waiting room this often."""
_LOCALHOST = "localhost"


def link_of(links: Sequence[PrefillLink], routed: RoutedRoom) -> PrefillLink:
    """The connection to the prefill node that a router chose: by the address that this node was given for it, or, where
    that is a name, by the address that it leads to.

    Raises :class:`RequestFailed` if it is none of ``links``, or not registered, so that the router tries another.
    """
    wanted = _normal(routed.address)
    for link in links:
        if wanted in _addresses(link):
            if not (link.registered or link.coming_back):
                raise RequestFailed(Failure("no_prefill", f"prefill {link.address}: {link.reason}"))
            return link
    known = ", ".join(link.address for link in links)
    message = f"prefill {routed.address} is not one of this decode node's, which are {known}: add it with --prefill"
    raise RequestFailed(Failure("unknown_prefill", message))


def _addresses(link: PrefillLink) -> set[tuple[str, int]]:
    """What the prefill node of ``link`` may be called."""
    host, port = _normal(link.address)
    return {(host, port), *((peer_host, port) for peer_host in link.dialer.peer_hosts)}


def _normal(address: str) -> tuple[str, int]:
    """The same for every spelling of an address; a name stays a name."""
    host, port = split_address(address.lower())
    host = "127.0.0.1" if host == _LOCALHOST else host.strip("[]")
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return host, port


def announce(req: DecodeRequest, pair_s: float, now: float) -> Failure | None:
    """Says ``Waiting`` where it is due. Returns why the room can come to nothing, if it is so.

    One that stays without its other half for ``pair_s`` ends.
    """
    link, known = req.link, req.announced
    if link is None or req.request.routed is None:
        return None
    registration = link.registration
    if registration is None:
        return None if link.coming_back else Failure("no_prefill", f"prefill {link.address}: {link.reason}")
    if known is not None and known.registration.prefill != registration.prefill:
        return Failure("peer_lost", f"prefill {link.address} has restarted")
    if known is None or known.registration != registration:
        known = req.announced = Announced(registration, now, float("-inf"))
    waited_s = now - known.since
    if not known.has_arrived and waited_s > pair_s:
        reason = f"phase pair: no request for room {req.key.room} was reported by prefill {link.address} for "
        return Failure("deadline", f"{reason}{waited_s:.1f} s (deadline {pair_s:g} s)")
    if now - known.at >= REPEAT_S:
        known.at = now
        link.send(Waiting(**room_ids(registration, req.key.room, req.key.epoch)))
    return None


def has_arrived(req: DecodeRequest) -> bool:
    """Whether the router's request has come to the prefill node, in the registration that is valid now."""
    known = req.announced
    if known is None or req.link is None:
        return False
    return known.has_arrived and known.registration == req.link.registration


def withdraw(req: DecodeRequest, reason: str) -> None:
    """The room is over before it had memory."""
    known, link = req.announced, req.link
    if known is not None and link is not None and link.registration == known.registration:
        link.send(Abort(**room_ids(known.registration, req.key.room, req.key.epoch), reason=clip(reason)))
