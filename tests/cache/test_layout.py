from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.cache.arena import Arena
from server.cache.digest import live_digests
from server.cache.layout import PROBE_NBYTES, ArenaLayout, Placement, Run
from server.cache.live import live_positions
from server.cache.specs import CacheGeometry, ComponentSpec, LayoutError, Scope
from tests.transfer.support import make_geometry


def rows_one_by_one(layout: ArenaLayout, n: int, placement: Placement) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges of the live rows without any merging."""
    return {
        name: [(layout.row_offset(name, placement, row), layout.component(name).row_nbytes) for row in rows]
        for name, rows in live_positions(n, layout.window, layout.names).items()
    }


def random_placement(seed: int, n: int) -> Placement:
    rng = random.Random(seed)
    return Placement(rng.randrange(1, 5), tuple(rng.sample(range(1, 9), k=-(-n // 256))))


@given(n=st.integers(1, 1100), k=st.sampled_from([0, 1, 3, 5]), seed=st.integers(0, 99))
def test_runs_are_the_live_rows_in_logical_order(n: int, k: int, seed: int) -> None:
    layout = ArenaLayout.from_geometry(make_geometry(pages=9, extra_rows=k))
    placement = random_placement(seed, n)
    runs = layout.live_runs(n, placement)
    for name, rows in rows_one_by_one(layout, n, placement).items():
        by_row = [offset + i for offset, nbytes in rows for i in range(nbytes)]
        by_run = [run.offset + i for run in runs[name] for i in range(run.nbytes)]
        assert by_run == by_row, name
    assert layout.live_nbytes(n) == {name: sum(r.nbytes for r in part) for name, part in runs.items()}


def test_no_two_components_share_a_byte() -> None:
    geometry = make_geometry(pages=9, extra_rows=3)
    layout = ArenaLayout.from_geometry(geometry)
    owner: dict[int, str] = {}
    for c in layout.components:
        for item in range(c.items):
            start = c.offset + item * c.item_stride
            for byte in range(start, start + c.rows * c.row_nbytes):
                assert byte not in owner, f"{c.name} and {owner[byte]} share byte {byte}"
                assert PROBE_NBYTES <= byte < layout.nbytes
                owner[byte] = c.name


def test_a_page_is_one_block_and_neighbours_touch() -> None:
    layout = ArenaLayout.from_geometry(make_geometry())
    parts = [c.rows * c.row_nbytes for c in layout.page_components]
    assert [c.name for c in layout.page_components] == ["c4_kv", "c4_index", "c128_kv"]
    assert layout.page_nbytes == sum(parts)
    third, fourth = (layout.row_offset("c4_kv", Placement(1, (page,)), 0) for page in (3, 4))
    assert fourth == third + layout.page_nbytes


def test_views_and_runs_mean_the_same_bytes() -> None:
    arena = Arena(ArenaLayout.from_geometry(make_geometry(dtype="bfloat16")))
    placement = Placement(2, (5, 3))
    arena.view("c4_kv")[3, 6, 1] = torch.arange(8.0)  # entry 64 + 6, second layer
    (run,) = arena.layout.runs("c4_kv", range(70, 71), placement)
    data = torch.frombuffer(bytearray(arena.read([run])), dtype=torch.bfloat16)
    assert data.tolist() == [0.0] * 8 + list(range(8))
    arena.view("c128_state")[2, 130 % 128, 0] = torch.arange(16.0)
    (run,) = arena.layout.runs("c128_state", range(130, 131), placement)
    assert torch.frombuffer(bytearray(arena.read([run])), dtype=torch.float32).tolist() == list(range(16))


def test_a_wrapping_ring_is_two_runs() -> None:
    layout = ArenaLayout.from_geometry(make_geometry())
    assert len(layout.runs("swa", range(9, 24), Placement(1, ()))) == 2
    assert len(layout.runs("swa", range(17, 31), Placement(1, ()))) == 1


def test_more_live_rows_than_the_ring_has_is_refused() -> None:
    layout = ArenaLayout.from_geometry(make_geometry())
    with pytest.raises(LayoutError, match="swa has 17 live rows but a ring of 16"):
        layout.runs("swa", range(17), Placement(1, ()))


def test_too_few_pages_are_refused() -> None:
    layout = ArenaLayout.from_geometry(make_geometry())
    with pytest.raises(LayoutError, match="entry 64 lies on page 1 of the request, which has 1 pages"):
        layout.runs("c4_kv", range(65), Placement(1, (1,)))


@given(n=st.integers(1, 600), seeds=st.tuples(st.integers(0, 99), st.integers(100, 199)))
def test_digests_do_not_depend_on_rings_pages_and_slots(n: int, seeds: tuple[int, int]) -> None:
    digests = []
    for k, seed in zip((0, 3), seeds, strict=True):
        arena = Arena(ArenaLayout.from_geometry(make_geometry(pages=9, extra_rows=k)), poison=True)
        placement = random_placement(seed, n)
        rng = random.Random(n)
        for rows in rows_one_by_one(arena.layout, n, placement).values():
            for offset, nbytes in rows:
                arena.write(Run(offset, nbytes), rng.randbytes(nbytes))
        digests.append(live_digests(arena, n, placement))
    assert digests[0] == digests[1]


def test_poison_fills_everything_but_item_zero_and_the_probe_region() -> None:
    arena = Arena(ArenaLayout.from_geometry(make_geometry(dtype="bfloat16")), poison=True)
    for name in arena.layout.names:
        view = arena.view(name)
        assert not view[0].float().any()
        assert (view[1:] == 255).all() if view.dtype == torch.uint8 else view[1:].isnan().all()
    assert not arena.buffer[:PROBE_NBYTES].any()


def test_scrub_restores_the_poison_of_one_placement_only() -> None:
    arena = Arena(ArenaLayout.from_geometry(make_geometry(dtype="bfloat16")), poison=True)
    for name in ("swa", "c4_kv"):
        arena.view(name)[1:3] = 1.0
    arena.scrub(Placement(2, (2,)))
    for name in ("swa", "c4_kv"):
        assert arena.view(name)[2].isnan().all()
        assert (arena.view(name)[1] == 1).all()


def test_geometry_names_what_does_not_fit() -> None:
    spec = ComponentSpec("c128_kv", Scope.PAGE, 128, (0,), 4, "float32")
    with pytest.raises(LayoutError, match="page size 200 is not a multiple of c128_kv's 128"):
        CacheGeometry(200, 4, 4, 16, 0, (spec,))
    with pytest.raises(LayoutError, match="at least 2 pages and 2 slots"):
        CacheGeometry(256, 1, 4, 16, 0, (spec,))
