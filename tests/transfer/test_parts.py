"""Rows that go in parts: cut, sent a few at a time, sent again, put together; refused where they cannot be right."""

from __future__ import annotations

import random

import pytest
import xxhash

from server.transfer.parts import MAX_UNDER_WAY, PART_NBYTES, BadPart, Part, PartsReceived, PartsToSend


def rows(n: int, seed: int = 0, nbytes: int = 36) -> bytes:
    return random.Random(seed).randbytes(n * nbytes)


def test_rows_are_cut_into_parts_and_few_are_under_way() -> None:
    parts, data = PartsToSend(36, first=1), rows(20_000)
    parts.add(data)
    most = PART_NBYTES // 36
    first = parts.next()
    assert [part.start for part in first] == [1 + i * most for i in range(MAX_UNDER_WAY)]
    assert parts.next() == []
    assert parts.again() == first
    assert not parts.arrived(most)  # one position less than the first part has
    assert parts.arrived(1 + 2 * most)
    assert [part.start for part in parts.next()] == [1 + i * most for i in (4, 5)]
    sent = [*first, *parts.again()[2:]]
    while not parts.have_all_arrived:
        parts.arrived(10**6)
        sent += parts.next()
    assert b"".join(part.rows for part in sent) == data
    assert (parts.stop, parts.digest) == (20_001, xxhash.xxh3_64_intdigest(data))
    assert parts.again() == []


def test_what_comes_in_any_order_is_put_together_in_one() -> None:
    data = rows(500)
    for seed in range(50):
        rng = random.Random(seed)
        sending, received = PartsToSend(36, first=1), PartsReceived(36, first=1, stop=501)
        for i in range(0, 500, 60):
            sending.add(data[i * 36 : (i + 60) * 36])
        on_the_way: list[Part] = []
        n_rounds = 0
        while not sending.have_all_arrived:
            n_rounds += 1
            assert n_rounds < 1000
            on_the_way += sending.next() if rng.random() < 0.5 else sending.again()
            rng.shuffle(on_the_way)
            for part in on_the_way[: rng.randrange(1 + len(on_the_way))]:
                received.take(*part)
            on_the_way = on_the_way[: rng.randrange(6)]
            if rng.random() < 0.7:
                sending.arrived(received.next)
        assert bytes(received.rows) == data
        assert received.is_complete
        assert received.digest == sending.digest


@pytest.mark.parametrize(
    ("start", "part", "words"),
    [
        (5, rows(1)[:-1], "35 bytes for position 5 are no whole number of rows of 36"),
        (5, b"", "0 bytes for position 5"),
        (0, rows(1), r"positions 0 \.\. 0 are outside of 1 \.\. 9"),
        (9, rows(2), r"positions 9 \.\. 10 are outside of 1 \.\. 9"),
        (2, rows(2, seed=9), r"positions 2 \.\. 3 came again, and are others"),
        (4, rows(2, seed=9), r"positions 4 \.\. 5 came again, and are others"),
    ],
)
def test_a_part_that_cannot_be_right_is_refused(start: int, part: bytes, words: str) -> None:
    received = PartsReceived(36, first=1, stop=10)
    assert received.take(1, rows(4))
    with pytest.raises(BadPart, match=words):
        received.take(start, part)
    assert received.next == 5


def test_a_copy_and_a_part_behind_a_gap_are_left_out() -> None:
    received = PartsReceived(36, first=1, stop=10)
    data = rows(9)
    assert received.take(1, data[: 4 * 36])
    assert not received.take(1, data[: 4 * 36])
    assert not received.take(2, data[36 : 3 * 36])
    assert not received.take(7, data[6 * 36 :])
    assert (received.next, received.is_complete) == (5, False)
    assert received.take(5, data[4 * 36 :])
    assert (bytes(received.rows), received.is_complete) == (data, True)


def test_no_rows_are_complete_at_once() -> None:
    parts, received = PartsToSend(12, first=1), PartsReceived(12, first=1, stop=1)
    assert (parts.have_all_arrived, parts.stop) == (True, 1)
    assert received.is_complete
    assert parts.digest == received.digest == xxhash.xxh3_64_intdigest(b"")
