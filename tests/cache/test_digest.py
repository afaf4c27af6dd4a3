"""Digests of a request's state compose: page by page as pages become complete, or all at once."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from server.cache.digest import StateDigests, live_digests
from server.cache.layout import ArenaLayout, Placement, Run
from server.cache.live import live_positions
from server.cache.specs import LayoutError, Scope
from tests.transfer.support import PAGE_SIZE, WINDOW, make_geometry, random_arena

LAYOUT = ArenaLayout.from_geometry(make_geometry(draft=True))
ARENA = random_arena(LAYOUT, 3)
WHERE = Placement(2, (5, 1, 9, 3))


def spelt_out(n: int) -> dict[str, int]:
    """The definition in docs/protocol.md, row by row."""
    found = {}
    for name, rows in live_positions(n, WINDOW, LAYOUT.names).items():
        c = LAYOUT.component(name)
        parts: dict[int, bytes] = {}
        for row in rows:
            part = row // c.rows if c.scope is Scope.PAGE else 0
            run = Run(LAYOUT.row_offset(name, WHERE, row), c.row_nbytes)
            parts[part] = parts.get(part, b"") + ARENA.read([run])
        digests = [xxhash.xxh3_64_intdigest(parts[part]).to_bytes(8, "little") for part in sorted(parts)]
        found[name] = xxhash.xxh3_64_intdigest(b"".join(digests))
    return found


@pytest.mark.parametrize("n", [1, 3, 127, 128, 255, 256, 257, 263, 512, 700, 1024])
def test_digests_are_as_defined(n: int) -> None:
    assert live_digests(ARENA, n, WHERE) == spelt_out(n)


@given(n=st.integers(1, 4 * PAGE_SIZE), chunks=st.lists(st.integers(0, 4 * PAGE_SIZE), max_size=6))
def test_digests_do_not_depend_on_when_pages_are_taken(n: int, chunks: list[int]) -> None:
    digests = StateDigests(ARENA, n, WHERE)
    for n_computed in chunks:
        digests.take_pages(n_computed)
    assert digests.finish().digests() == live_digests(ARENA, n, WHERE)


@pytest.mark.parametrize("name", LAYOUT.names)
def test_every_live_byte_counts(name: str) -> None:
    """Also in the first page and in the last."""
    n = 263
    arena = random_arena(LAYOUT, 4)
    before = live_digests(arena, n, WHERE)
    for run in LAYOUT.live_runs(n, WHERE)[name]:
        for offset in (run.offset, run.offset + run.nbytes - 1):
            arena.buffer[offset] ^= 1
            changed = {key for key, digest in live_digests(arena, n, WHERE).items() if digest != before[key]}
            arena.buffer[offset] ^= 1
            assert changed == {name}
    assert live_digests(arena, n, WHERE) == before


def test_a_page_is_taken_once() -> None:
    """Taken when it was complete: what happens to it later does not count."""
    arena = random_arena(LAYOUT, 5)
    expected = live_digests(arena, 512, WHERE)
    digests = StateDigests(arena, 512, WHERE)
    digests.take_pages(300)
    c = LAYOUT.component("c4_kv")
    arena.buffer[c.offset + WHERE.pages[0] * c.item_stride] ^= 1
    assert digests.finish().digests() == expected
    assert live_digests(arena, 512, WHERE) != expected


def test_a_placement_with_too_few_pages_is_refused() -> None:
    with pytest.raises(LayoutError, match="c4_kv: 65 live entries do not fit on 1 pages"):
        StateDigests(ARENA, 260, Placement(1, (1,)))
