"""Rooms that a router chose, while they wait on the decode node, by a clock of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from server.decode.routed_rooms import REPEAT_S, announce, has_arrived, link_of, withdraw
from server.engine.request import RoutedRoom
from server.failure import RequestFailed
from server.transfer.protocol import Abort, AnyMessage, Registration, Waiting, room_ids
from server.transfer.rooms import RoomKey
from tests.nodes.support import request

PAIR_S = 10.0
ROOM = 7
NOW = Registration("a" * 32, "b" * 32, 1)
ROUTED = replace(request(20), routed=RoutedRoom(ROOM, "127.0.0.1", 1))


def waiting(epoch: int, registration: Registration = NOW) -> Waiting:
    return Waiting(**room_ids(registration, ROOM, epoch))


class FakeLink:
    address = "127.0.0.1:1"
    reason = "simulated"
    coming_back = True

    def __init__(self) -> None:
        self.registration: Registration | None = NOW
        self.sent: list[AnyMessage] = []

    def send(self, message: AnyMessage) -> None:
        self.sent.append(message)


def waiting_request(link: FakeLink) -> Any:
    return SimpleNamespace(key=RoomKey(ROOM, 3, NOW.decode), link=link, request=ROUTED, announced=None)


def test_a_waiting_room_is_announced_at_once_every_second_and_in_every_registration() -> None:
    link = FakeLink()
    req = waiting_request(link)
    for now in (0.0, REPEAT_S / 2, REPEAT_S, REPEAT_S + 0.1):
        assert announce(req, PAIR_S, now) is None
    assert link.sent == [waiting(3)] * 2
    assert not has_arrived(req)
    req.announced.has_arrived = True
    assert has_arrived(req)
    link.registration = None
    assert announce(req, PAIR_S, now) is None, "the peer comes back"
    assert not has_arrived(req)
    link.registration = later = NOW._replace(number=2)
    assert announce(req, PAIR_S, now) is None
    assert link.sent[2:] == [waiting(3, later)]
    assert not has_arrived(req), "that was said in another registration"
    withdraw(req, "bye")
    assert link.sent[3:] == [Abort(**room_ids(later, ROOM, 3), reason="bye")]


@pytest.mark.parametrize("has_both", [False, True])
def test_a_waiting_room_without_its_other_half_ends_by_the_deadline(has_both: bool) -> None:
    req = waiting_request(FakeLink())
    assert announce(req, PAIR_S, 0.0) is None
    req.announced.has_arrived = has_both
    failure = announce(req, PAIR_S, PAIR_S + 0.1)
    if has_both:
        assert failure is None, "a room that waits for memory alone has no such deadline"
    else:
        assert failure is not None
        assert (failure.code, failure.kind) == ("deadline", "deadline")
        assert f"room {ROOM}" in failure.reason


def test_a_waiting_room_ends_when_its_prefill_node_has_restarted_or_is_gone() -> None:
    link = FakeLink()
    req = waiting_request(link)
    announce(req, PAIR_S, 0.0)
    link.registration = NOW._replace(prefill="e" * 32, number=2)
    failure = announce(req, PAIR_S, 0.0)
    assert failure is not None
    assert failure.code == "peer_lost"
    link.registration, link.coming_back = None, False
    failure = announce(req, PAIR_S, 0.0)
    assert failure is not None
    assert (failure.code, failure.kind) == ("no_prefill", "unavailable")


def test_a_prefill_node_is_known_by_the_name_given_here_and_by_its_address() -> None:
    """As in Kubernetes: this node has the pod's name, and the router found the pod's address."""

    def link(address: str, *peer_hosts: str) -> Any:
        return SimpleNamespace(
            address=address, registered=True, dialer=SimpleNamespace(peer_hosts=frozenset(peer_hosts))
        )

    named, other = link("prefill-0.prefill:8998", "10.0.0.5"), link("10.0.0.6:8998")
    for host in ("10.0.0.5", "prefill-0.prefill", "PREFILL-0.prefill"):
        assert link_of([other, named], RoutedRoom(ROOM, host, 8998)) is named
    assert link_of([other, named], RoutedRoom(ROOM, "10.0.0.6", 8998)) is other
    for host, port in (("10.0.0.7", 8998), ("10.0.0.5", 8999)):
        with pytest.raises(RequestFailed, match="is not one of this decode node's"):
            link_of([other, named], RoutedRoom(ROOM, host, port))
