"""Requests whose prefill node a router chose, while they wait here for memory.

The router sent the prefill node the same request: it must know that the room is alive here, and learn at once when it
is not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.decode.receiver import Receiver
from server.decode.work import Work
from server.engine.request import NamedRoom, RequestFailed
from server.transfer.addresses import split_address
from server.transfer.peer import PeerLink
from server.transfer.protocol import Abort, RoomIds, Waiting, clip
from server.transfer.rooms import Failure, RoomKey

TELL_S = 1.0
"""A sign of life of every waiting room this often."""
_LOCALHOST = "localhost"


def link_of(receiver: Receiver | None, named: NamedRoom) -> PeerLink:
    """The connection to the prefill node that a router named.

    Raises :class:`RequestFailed`: 503 if this decode node does not know it or is not registered with it, so that the
    router tries another; 400 if it uses none (``receiver`` None).
    """
    if receiver is None:
        message = "this node computes prompts itself (--local-prefill): it has no rooms with a prefill node"
        raise RequestFailed("wrong_role", message, status=400)
    wanted = _normal(named.address)
    for link in receiver.links:
        if _normal(link.address) == wanted:
            if not (link.registered or link.coming_back):
                raise RequestFailed("no_prefill", f"prefill {link.address}: {link.reason}", status=503)
            return link
    known = ", ".join(link.address for link in receiver.links)
    message = f"prefill {named.address} is not one of this decode node's, which are {known}: add it with --prefill"
    raise RequestFailed("unknown_prefill", message, status=503)


def _normal(address: str) -> tuple[str, int]:
    """The same for every spelling of an address; a name stays a name."""
    host, port = split_address(address.lower())
    host = "127.0.0.1" if host == _LOCALHOST else host.strip("[]")
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return host, port


@dataclass
class _Told:
    """What the prefill node ``incarnation`` was told of a room, last at ``at``."""

    incarnation: str
    at: float


class WaitingRooms:
    """Tells prefill nodes of the named rooms that wait here. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[RoomKey, _Told] = {}

    def tick(self, queue: Iterable[Work]) -> list[tuple[Work, Failure]]:
        """Says ``Waiting`` where it is due. Returns the rooms whose prefill node is gone, with the reason."""
        now, gone = self._clock(), []
        for work in queue:
            link = work.link
            if link is None or work.request.named is None:
                continue
            told, theirs = self._told.get(work.key), link.theirs if link.registered else None
            if theirs is None:
                if not link.coming_back:
                    gone.append((work, Failure("no_prefill", f"prefill {link.address}: {link.reason}", 503)))
            elif told is not None and told.incarnation != theirs.incarnation:
                gone.append((work, Failure("peer_lost", f"prefill {link.address} has restarted", 502)))
            elif told is None or now - told.at >= TELL_S:
                self._told[work.key] = _Told(theirs.incarnation, now)
                link.send(Waiting(**_ids(work.key, theirs.incarnation)))
        return gone

    def opened(self, key: RoomKey) -> None:
        """The room waits no longer: a ``Reserve`` follows, or the prefill node said itself that it is over."""
        self._told.pop(key, None)

    def given_up(self, work: Work, reason: str) -> None:
        """The room is over before it had memory."""
        told = self._told.pop(work.key, None)
        if told is not None and work.link is not None and work.link.registered:
            work.link.send(Abort(**_ids(work.key, told.incarnation), reason=clip(reason)))


def _ids(key: RoomKey, prefill: str) -> RoomIds:
    return {"prefill": prefill, "decode": key.decode, "room": key.room, "epoch": key.epoch}
