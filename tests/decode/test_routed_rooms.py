"""Rooms that a router chose, while they wait on the decode node, by a clock of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from server.decode.routed_rooms import REPEAT_S, RoutedRooms
from server.engine.request import RoutedRoom
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
    return SimpleNamespace(key=RoomKey(ROOM, 3, NOW.decode), link=link, request=ROUTED)


def test_a_waiting_room_is_announced_at_once_every_second_and_in_every_registration() -> None:
    link, now = FakeLink(), [0.0]
    rooms, req = RoutedRooms(PAIR_S, clock=lambda: now[0]), waiting_request(link)
    for now[0] in (0.0, REPEAT_S / 2, REPEAT_S, REPEAT_S + 0.1):
        assert rooms.tick([req]) == []
    assert link.sent == [waiting(3)] * 2
    assert rooms.request_arrived(req.key)
    assert rooms.is_paired(req)
    link.registration = None
    assert rooms.tick([req]) == [], "the peer comes back"
    assert not rooms.is_paired(req)
    link.registration = later = NOW._replace(number=2)
    assert rooms.tick([req]) == []
    assert link.sent[2:] == [waiting(3, later)]
    assert not rooms.is_paired(req), "that was said in another registration"
    rooms.given_up(req, "bye")
    assert link.sent[3:] == [Abort(**room_ids(later, ROOM, 3), reason="bye")]
    assert not rooms.request_arrived(req.key)


@pytest.mark.parametrize("is_paired", [False, True])
def test_a_waiting_room_without_its_other_half_ends_by_the_deadline(is_paired: bool) -> None:
    link, now = FakeLink(), [0.0]
    rooms, req = RoutedRooms(PAIR_S, clock=lambda: now[0]), waiting_request(link)
    rooms.tick([req])
    if is_paired:
        rooms.request_arrived(req.key)
    now[0] = PAIR_S + 0.1
    ended = rooms.tick([req])
    assert len(ended) == (not is_paired), "a room that waits for memory alone has no such deadline"
    for _, failure in ended:
        assert (failure.code, failure.kind) == ("deadline", "deadline")
        assert f"room {ROOM}" in failure.reason


def test_a_waiting_room_ends_when_its_prefill_node_has_restarted_or_is_gone() -> None:
    link = FakeLink()
    rooms, req = RoutedRooms(PAIR_S, clock=lambda: 0.0), waiting_request(link)
    rooms.tick([req])
    link.registration = NOW._replace(prefill="e" * 32, number=2)
    ((_, failure),) = rooms.tick([req])
    assert failure.code == "peer_lost"
    link.registration, link.coming_back = None, False
    ((_, failure),) = rooms.tick([req])
    assert (failure.code, failure.kind) == ("no_prefill", "unavailable")
