"""The arrays of a step, and the steps that are refused before anything is computed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from server.cache.layout import Placement
from server.kernels.plan import MAX_POSITION, StepPlan
from server.model.batch import Segment
from server.model.interface import BadStep

PAGE = 256


def numbers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def planned(segments: Sequence[Segment], *, every_row: bool = True, page_size: int = PAGE) -> StepPlan:
    return StepPlan(segments, page_size, every_row=every_row, threads=3)


SEGMENTS = [
    Segment([7, 8, 9], 255, Placement(4, (11, 12, 13)), valid_from=2),
    Segment((5,), 0, Placement(2, (14,))),
]


def test_arrays_of_two_segments() -> None:
    plan = planned(SEGMENTS)
    step = plan.step
    assert (step.rows, step.segments, step.max_pages, step.n_wanted, step.threads) == (4, 2, 2, 4, 3)
    assert numbers(step.position, 4) == [255, 256, 257, 0]
    assert numbers(step.segment, 4) == [0, 0, 0, 1]
    assert numbers(step.token, 4) == [7, 8, 9, 5]
    assert numbers(step.slot, 2) == [4, 2]
    assert numbers(step.start, 2) == [255, 0]
    assert numbers(step.first_row, 2) == [0, 3]
    assert numbers(step.valid_from, 2) == [2, 0]
    assert numbers(step.pages, 4) == [11, 12, 14, -1]
    assert numbers(step.wanted, 4) == [0, 1, 2, 3]


def test_last_rows_only() -> None:
    plan = planned(SEGMENTS, every_row=False)
    assert plan.n_wanted == 2
    assert numbers(plan.step.wanted, 2) == [2, 3]


def test_a_step_without_pages() -> None:
    assert planned(SEGMENTS, page_size=0).step.max_pages == 0


@pytest.mark.parametrize(
    ("segment", "row", "words"),
    [
        (Segment([], 3, Placement(1, (1,))), 1, "0 tokens from position 3 on are not a run"),
        (Segment([1], -1, Placement(1, (1,))), 1, "1 tokens from position -1 on are not a run"),
        (Segment([1, 2], MAX_POSITION - 1, Placement(1, (1,))), 1, f"are not a run below {MAX_POSITION}"),
        (Segment([1, 2], 255, Placement(1, (1,))), 2, "position 256 lies on page 1 of a request with 1 pages"),
        (Segment([1 << 63], 0, Placement(1, (1,))), -1, "a token id or a position of it: int too big"),
    ],
)
def test_a_segment_that_cannot_be_is_refused_by_its_row(segment: Segment, row: int, words: str) -> None:
    with pytest.raises(BadStep, match=words) as caught:
        planned([SEGMENTS[1], segment])
    assert caught.value.row == row
