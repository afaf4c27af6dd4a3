"""The halves of rooms that routers name, by a clock of their own: who is told what, and what is remembered how long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest

from server.cache.handoff import prompt_hash
from server.engine.request import RoutedRoom
from server.failure import Failure, RequestFailed
from server.prefill.decode_peer import DecodePeer
from server.prefill.request import PrefillRequest
from server.prefill.room import PrefillRoom
from server.prefill.routed_rooms import REMEMBER_S, RoutedRooms
from server.telemetry.record import PhaseName
from server.telemetry.rooms import PREFILL, RoomRecords
from server.transfer.protocol import AnyMessage, Failed, Registration, RequestArrived, RoutedRequest, Waiting, room_ids
from server.transfer.rooms import Deadlines, Heartbeat, RoomKey, Tombstones
from tests.nodes.support import request
from tests.support.fake_tokenizer import FakeTokenizer
from tests.transfer.support import make_manifest
from tests.transfer.test_protocol import SAMPLING, reserve

PAIR_S = 10.0
ROOM = 7
NOW = Registration("a" * 32, "b" * 32, 1)
ASKED = replace(request(20), routed=RoutedRoom(ROOM, "127.0.0.1", 1))
GONE = Failure("aborted", "the client aborted the request")


def waiting(epoch: int, registration: Registration = NOW) -> Waiting:
    return Waiting(**room_ids(registration, ROOM, epoch))


@dataclass
class Halves:
    """A :class:`RoutedRooms`, what it sent to decode nodes (by epoch), and its clock."""

    now: float = 0.0
    invited: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    peers: dict[Registration, DecodePeer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records = RoomRecords(PREFILL, 8, lambda: self.now)
        self.routed_rooms = RoutedRooms(
            lambda req, event: None,
            Tombstones(),
            FakeTokenizer(),
            PAIR_S,
            clock=lambda: self.now,
            records=self.records,
        )

    def send(self, routing_id: bytes, message: AnyMessage) -> None:
        if isinstance(message, RequestArrived):
            self.invited.append(message.epoch)
        else:
            assert isinstance(message, Failed)
            self.refused.append((message.epoch, message.code))

    def is_connected(self, routing_id: bytes) -> bool:
        return True

    def peer(self, registration: Registration) -> DecodePeer:
        """The decode node in this registration; the socket below it is this object."""
        if registration not in self.peers:
            manifest = make_manifest("decode", incarnation=registration.decode)
            heartbeat = Heartbeat(10.0, self.now)
            self.peers[registration] = DecodePeer(registration, manifest, b"D", heartbeat, self)
        return self.peers[registration]

    def http(self) -> Any:
        return self.routed_rooms.submit(ASKED)

    def http_fails(self) -> str:
        with pytest.raises(RequestFailed) as caught:
            self.http()
        return caught.value.code

    def decode(self, epoch: int, registration: Registration = NOW) -> None:
        self.routed_rooms.on_waiting(self.peer(registration), waiting(epoch, registration))

    def reserve(self, epoch: int, prompt: tuple[int, ...] = ASKED.prompt_ids) -> Failure | None:
        """The decode node reserves the room with this prompt: why not."""
        asked = RoutedRequest("request-1", len(prompt), prompt_hash(prompt), SAMPLING)
        message = reserve(**room_ids(NOW, ROOM, epoch), request=asked)
        room = PrefillRoom(message, len(prompt), Deadlines(), self.now)
        record = self.records.open(ROOM, "request-1", n_prompt=len(prompt), max_new=1, first=PhaseName.PREFILL_QUEUE)
        return self.routed_rooms.join(PrefillRequest(room, ASKED, self.peer(NOW), Mock(), record))

    def decode_ends(self, epoch: int) -> None:
        self.routed_rooms.given_up(RoomKey(ROOM, epoch, NOW.decode), GONE)


def test_a_waiting_decode_node_is_invited_when_both_halves_are_there_and_again_while_it_asks() -> None:
    halves = Halves()
    halves.decode(1)
    halves.decode(1)
    assert halves.invited == []
    generation = halves.http()
    assert halves.invited == [1]
    halves.decode(1)
    assert halves.invited == [1, 1], "the first one may be lost"
    assert not generation.ended
    assert halves.refused == []


def test_the_end_of_one_half_is_for_one_half_of_the_other_side_only() -> None:
    halves = Halves()
    halves.http().abort()
    halves.decode(1)
    halves.decode(2)
    assert halves.refused == [(1, "prefill_client_gone")]
    halves.http()
    assert halves.invited == [2]

    halves = Halves()
    halves.decode(1)
    halves.decode_ends(1)
    assert halves.http_fails() == "decode_gave_up"
    halves.http()
    halves.decode(2)
    assert halves.invited == [2]


def test_a_new_half_of_the_side_that_ended_belongs_to_a_new_room() -> None:
    halves = Halves()
    halves.http().abort()
    halves.http()
    halves.decode(1)
    assert (halves.invited, halves.refused) == ([1], [])

    halves = Halves()
    halves.decode(1)
    halves.decode_ends(1)
    halves.decode(2)
    halves.http()
    assert halves.invited == [2]


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_an_end_is_remembered_from_the_first_one_on_however_often_the_id_is_tried(first: str) -> None:
    """A client that tries again every half second, and closes one half as soon as the other has failed."""
    halves, n_failed, epoch = Halves(), 0, 0
    halves.http().abort()
    while halves.now < 3 * REMEMBER_S:
        epoch += 1
        if first == "prefill":
            at_p = halves.http()
            halves.decode(epoch)
        else:
            halves.decode(epoch)
            at_p = halves.http()
        if halves.invited[-1:] != [epoch]:
            n_failed += 1
        at_p.abort()
        halves.now += 0.5
    assert n_failed == (0 if first == "prefill" else 1)


def test_an_end_is_forgotten_after_its_time() -> None:
    halves = Halves()
    halves.http().abort()
    halves.now = REMEMBER_S + 0.01
    halves.decode(1)
    assert halves.refused == []


def test_half_a_room_ends_by_the_deadline_on_either_side() -> None:
    halves = Halves()
    generation = halves.http()
    halves.now = PAIR_S + 0.1
    halves.routed_rooms.tick()
    assert generation.ended
    halves = Halves()
    halves.decode(1)
    for halves.now in (PAIR_S - 0.1, PAIR_S + 0.1):
        halves.decode(1)
        halves.routed_rooms.tick()
    assert halves.refused == [(1, "deadline")], "a sign of life does not bring the request"
    assert halves.routed_rooms.n_decode == 0


def test_a_late_copy_of_an_earlier_waiting_changes_nothing() -> None:
    halves = Halves()
    halves.decode(2)
    halves.decode(1)
    generation = halves.http()
    assert halves.invited == [2]
    halves.decode(1)
    halves.decode_ends(1)
    assert not generation.ended
    assert halves.invited == [2]


def test_another_decode_node_does_not_get_the_room() -> None:
    other = Registration("a" * 32, "c" * 32, 1)
    halves = Halves()
    halves.decode(1)
    halves.decode(5, other)
    assert halves.refused == [(5, "duplicate_room")]
    halves.http()
    halves.decode(6, other)
    assert (halves.refused[1:], halves.invited) == ([(6, "duplicate_room")], [1])


def test_what_waited_in_a_registration_that_is_over_is_sent_anew() -> None:
    later = NOW._replace(number=2)
    halves = Halves()
    halves.decode(1)
    halves.routed_rooms.on_lost(halves.peer(NOW))
    assert halves.routed_rooms.n_decode == 0
    halves.http()
    assert halves.invited == []
    halves.decode(1, later)
    assert halves.invited == [1]


def test_the_end_of_a_room_that_had_both_halves_is_not_remembered() -> None:
    halves = Halves()
    halves.decode(1)
    generation = halves.http()
    assert halves.reserve(1) is None
    generation.abort()
    halves.decode(2)
    assert halves.refused == [], "a later room with this id"


def test_a_prompt_of_the_same_length_with_another_hash_is_refused() -> None:
    halves = Halves()
    halves.decode(1)
    halves.http()
    failure = halves.reserve(1, (*ASKED.prompt_ids[:-1], ASKED.prompt_ids[-1] + 1))
    assert failure is not None
    assert failure.code == "prompt_mismatch"
