"""The copy plan moves exactly the live bytes, whatever the rings, pages and slots on either side."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.live import live_positions
from server.cache.specs import LayoutError, Scope
from server.transfer.plan import CopyPlan, Push, Rows, Side, check_coverage, check_nbytes
from server.transfer.protocol import Sent
from tests.transfer.support import PAGE_SIZE, WINDOW, make_geometry, random_arena

SOURCE = ArenaLayout.from_geometry(make_geometry(slots=4, pages=9, draft=True))
SOURCE_ARENA = random_arena(SOURCE, 1)


def apply(push: Push, source: Arena, target: Arena) -> None:
    for copy in push.copies:
        target.buffer[copy.dst : copy.dst + copy.nbytes] = source.buffer[copy.src : copy.src + copy.nbytes]


def sent_of(pushes: list[Push]) -> tuple[Sent, ...]:
    merged: dict[str, Rows] = {}
    for rows in (rows for push in pushes for rows in push.rows):
        known = merged.get(rows.component)
        if known is not None:
            assert known.stop == rows.start
        known = known or Rows(rows.component, rows.start, rows.start, 0)
        nbytes, held_nbytes = known.nbytes + rows.nbytes, known.held_nbytes + rows.held_nbytes
        merged[rows.component] = Rows(rows.component, known.start, rows.stop, nbytes, held_nbytes)
    return tuple(Sent(r.component, r.start, r.stop, r.nbytes, 0, r.held_nbytes, 0) for r in merged.values())


Case = tuple[int, int, Placement, Placement, list[int], set[int]]
"""Tokens, additional rows of the target's rings, both placements, what is computed when pages go, and held pages."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(
        st.one_of(
            st.sampled_from([1, 3, 4, 5, 15, 16, 17, 127, 128, 129, 255, 256, 257, 512, 1025]), st.integers(1, 2048)
        )
    )
    n_pages = -(-n // PAGE_SIZE)
    extra_rows = draw(st.integers(0, 6))
    pages_here = tuple(draw(st.permutations(range(1, 9)))[:n_pages])
    pages_there = tuple(draw(st.permutations(range(1, 12)))[: n_pages + draw(st.integers(0, 2))])
    chunks = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
    return (
        n,
        extra_rows,
        Placement(draw(st.integers(1, 3)), pages_here),
        Placement(draw(st.integers(1, 6)), pages_there),
        chunks,
        draw(st.sets(st.integers(0, max(0, n // PAGE_SIZE - 1)))) if n >= PAGE_SIZE else set(),
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_moves_every_live_byte_once_and_no_other_and_nothing_of_held_pages(case: Case) -> None:
    n, extra_rows, here, there, chunks, held = case
    target = ArenaLayout.from_geometry(make_geometry(slots=7, pages=12, extra_rows=extra_rows, draft=True))
    names = target.names
    plan = CopyPlan(Side(SOURCE, here), Side(target, there), n, names)
    pushes, n_pages_sent = [], 0
    for n_computed in chunks:
        pushes.append(plan.full_pages(n_pages_sent, max(n_pages_sent, n_computed // PAGE_SIZE), held))
        n_pages_sent = max(n_pages_sent, n_computed // PAGE_SIZE)
    pushes.append(plan.tail(n_pages_sent, held))

    target_arena = random_arena(target, 2)
    expected = target_arena.buffer.clone()
    n_sent, n_held = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for name, rows in live_positions(n, WINDOW, names).items():
        component = target.component(name)
        row_nbytes = component.row_nbytes
        for row in rows:  # the oracle: one row at a time
            if component.scope is Scope.PAGE and row // component.rows in held:
                n_held[name] += row_nbytes
                continue
            n_sent[name] += row_nbytes
            src, dst = SOURCE.row_offset(name, here, row), target.row_offset(name, there, row)
            expected[dst : dst + row_nbytes] = SOURCE_ARENA.buffer[src : src + row_nbytes]
    for push in pushes:
        apply(push, SOURCE_ARENA, target_arena)
    assert target_arena.buffer.equal(expected)

    written = [(c.dst, c.dst + c.nbytes) for push in pushes for c in push.copies]
    assert sum(stop - start for start, stop in written) == sum(n_sent.values())
    ordered = sorted(written)
    assert all(a[1] <= b[0] for a, b in pairwise(ordered)), "a byte is written twice"
    claims = sent_of(pushes)
    assert check_coverage(claims, live_positions(n, WINDOW, names)) is None
    assert {claim.component: (claim.nbytes, claim.held_nbytes) for claim in claims} == {
        name: (n_sent[name], n_held[name]) for name in names
    }
    assert {name: n_sent[name] + n_held[name] for name in names} == target.live_nbytes(n)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_request_takes_few_pieces(case: Case) -> None:
    n, extra_rows, here, there, _, _ = case
    target = ArenaLayout.from_geometry(make_geometry(slots=7, pages=12, extra_rows=extra_rows, draft=True))
    push = CopyPlan(Side(SOURCE, here), Side(target, there), n, target.names).tail(0)
    n_full = n // PAGE_SIZE
    breaks = sum(
        here.pages[i + 1] != here.pages[i] + 1 or there.pages[i + 1] != there.pages[i] + 1 for i in range(n_full - 1)
    )
    n_runs = breaks + (n_full > 0)
    n_rings = sum(c.scope is Scope.SLOT for c in target.components) - 1
    assert len(push.copies) <= n_runs + 3 + 3 * n_rings + 1


def test_adjacent_full_pages_are_one_piece() -> None:
    plan = CopyPlan(Side(SOURCE, Placement(1, (3, 4, 5))), Side(SOURCE, Placement(2, (5, 6, 7))), 700, SOURCE.names)
    (copy,) = plan.full_pages(0, 2).copies
    assert copy.nbytes == 2 * SOURCE.page_nbytes


def test_a_held_page_in_the_middle_parts_the_pieces_and_is_claimed() -> None:
    plan = CopyPlan(Side(SOURCE, Placement(1, (3, 4, 5))), Side(SOURCE, Placement(2, (5, 6, 7))), 768, SOURCE.names)
    push = plan.full_pages(0, 3, {1})
    assert [copy.nbytes for copy in push.copies] == [SOURCE.page_nbytes] * 2
    rows = {each.component: each for each in push.rows}["c4_kv"]
    assert (rows.start, rows.stop, rows.nbytes) == (0, 192, 2 * rows.held_nbytes)


def test_a_full_page_without_one_component_leaves_its_bytes_out() -> None:
    names = [name for name in SOURCE.names if name != "c4_index"]
    plan = CopyPlan(Side(SOURCE, Placement(1, (3,))), Side(SOURCE, Placement(2, (5,))), 256, names)
    push = plan.full_pages(0, 1)
    left_out = SOURCE.component("c4_index")
    assert sum(copy.nbytes for copy in push.copies) == SOURCE.page_nbytes - left_out.rows * left_out.row_nbytes


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Placement(0, (1, 2)), "swa"),
        (Placement(4, (1, 2)), "swa"),
        (Placement(1, (1,)), "c4_kv"),
        (Placement(1, (1, 1)), "c4_kv"),
        (Placement(1, (1, 9)), "c4_kv"),
        (Placement(1, (0, 1)), "c4_kv"),
    ],
)
def test_a_placement_that_cannot_hold_the_prompt_is_refused_by_component(target: Placement, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        CopyPlan(Side(SOURCE, Placement(1, (1, 2))), Side(SOURCE, target), 300, SOURCE.names)


def test_pages_that_are_not_full_are_refused() -> None:
    plan = CopyPlan(Side(SOURCE, Placement(1, (1, 2))), Side(SOURCE, Placement(1, (1, 2))), 300, SOURCE.names)
    with pytest.raises(LayoutError, match="not full"):
        plan.full_pages(0, 2)


def coverage_of(n: int, **changes: tuple[int, int, int] | None) -> str | None:
    """The component that coverage or byte counts name, with some claims changed (None: left out)."""
    live, nbytes = live_positions(n, WINDOW, SOURCE.names), SOURCE.live_nbytes(n)
    claims = {name: (rows.start, rows.stop, nbytes[name]) for name, rows in live.items()}
    for name, change in changes.items():
        if change is None:
            del claims[name]
        else:
            claims[name] = change
    sent = [Sent(name, start, stop, size, 0, 0, 0) for name, (start, stop, size) in claims.items()]
    live = live_positions(n, WINDOW, SOURCE.names)
    error = check_coverage(sent, live) or check_nbytes(sent, SOURCE.live_nbytes(n))
    return error.component if error else None


def test_coverage_names_the_component_that_is_short_missing_or_too_much() -> None:
    assert coverage_of(300) is None
    assert coverage_of(300, swa=None) == "swa"
    nbytes = SOURCE.live_nbytes(300)
    assert coverage_of(300, c4_kv=(0, 74, nbytes["c4_kv"])) == "c4_kv"
    assert coverage_of(300, c4_kv=(0, 75, nbytes["c4_kv"] - 1)) == "c4_kv"
    assert coverage_of(300, swa=(284, 300, nbytes["swa"])) == "swa"
    assert coverage_of(300, c9_kv=(0, 0, 0)) == "c9_kv"
    assert coverage_of(256, c128_state=(256, 256, 0)) is None, "an empty component is declared empty"
    assert coverage_of(256, c128_state=None) == "c128_state", "an empty component is never skipped"
