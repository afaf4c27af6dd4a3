"""Which registration a message belongs to, and which may still be begun."""

from __future__ import annotations

import pytest

from server.prefill.registrations import MAX_REMEMBERED, Registrations, Standing
from server.transfer.protocol import Quiesced, Registration, room_ids

PREFILL, DECODE, OTHER = "a" * 32, "b" * 32, "c" * 32
HERE, ELSEWHERE = b"here", b"elsewhere"


def registered(*numbers: int) -> Registrations:
    registrations = Registrations(PREFILL)
    for number in numbers:
        assert registrations.judge(DECODE, number, HERE) is Standing.NEW
        registrations.begin(DECODE, number, HERE)
    return registrations


@pytest.mark.parametrize(
    ("number", "standing"), [(1, Standing.OVER), (2, Standing.OVER), (5, Standing.CURRENT), (6, Standing.NEW)]
)
def test_only_a_higher_number_begins_another_registration(number: int, standing: Standing) -> None:
    assert registered(2, 5).judge(DECODE, number, HERE) is standing


@pytest.mark.parametrize(("number", "standing"), [(4, Standing.OVER), (5, Standing.OVER), (6, Standing.NEW)])
def test_one_that_was_lost_is_over_for_ever(number: int, standing: Standing) -> None:
    registrations = registered(5)
    registrations.end(Registration(PREFILL, DECODE, 5))
    assert registrations.judge(DECODE, number, HERE) is standing


def test_nobody_else_takes_a_registration_over_or_uses_its_numbers_up() -> None:
    registrations = registered(1)
    assert registrations.judge(DECODE, 9, ELSEWHERE) is Standing.ELSEWHERE
    registrations.end(Registration(PREFILL, DECODE, 1))
    registrations.begin(DECODE, 2**62, ELSEWHERE)
    registrations.end(Registration(PREFILL, DECODE, 2**62))
    assert registrations.judge(DECODE, 2, HERE) is Standing.NEW


@pytest.mark.parametrize(
    "other",
    [Registration(PREFILL, DECODE, 4), Registration(PREFILL, DECODE, 6), Registration(PREFILL, OTHER, 5),
     Registration(OTHER, DECODE, 5)],
    ids=["earlier", "later", "another decode node", "another life of the prefill node"],
)  # fmt: skip
def test_a_message_of_any_other_registration_is_not_covered(other: Registration) -> None:
    registrations, current = registered(4, 5), Registration(PREFILL, DECODE, 5)
    assert registrations.covers(Quiesced(**room_ids(current, 1, 1)), HERE)
    assert not registrations.covers(Quiesced(**room_ids(current, 1, 1)), ELSEWHERE)
    assert not registrations.covers(Quiesced(**room_ids(other, 1, 1)), HERE)
    registrations.end(other)
    assert registrations.covers(Quiesced(**room_ids(current, 1, 1)), HERE), "that was not this one"
    registrations.end(current)
    assert not registrations.covers(Quiesced(**room_ids(current, 1, 1)), HERE)


def test_what_is_remembered_of_lost_connections_is_bounded_and_that_of_registered_ones_is_kept() -> None:
    registrations = registered(1)
    for i in range(MAX_REMEMBERED + 10):
        decode = f"{i:032x}"
        registrations.end(registrations.begin(decode, 1, HERE))
    judged = [registrations.judge(f"{i:032x}", 1, HERE) for i in range(MAX_REMEMBERED + 10)]
    assert judged.count(Standing.OVER) == MAX_REMEMBERED - 1, "one place is the registered one's"
    assert judged[:11] == [Standing.NEW] * 11, "the oldest are forgotten"
    assert registrations.judge(DECODE, 1, HERE) is Standing.CURRENT
    assert registrations.judge(f"{MAX_REMEMBERED:032x}", 1, HERE) is Standing.OVER
