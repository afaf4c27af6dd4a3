"""A snapshot is the slot's live state at a page boundary: bytes that can be put back, or are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from server.cache.arena import Arena
from server.cache.capacity import slot_names, snapshot_nbytes
from server.cache.layout import ArenaLayout, Placement
from server.cache.live import live_positions
from server.cache.snapshots import (
    Snapshot,
    SnapshotPoint,
    restore_snapshot,
    take_snapshot,
)
from server.cache.specs import HANDOFF, LayoutError
from tests.transfer.support import make_geometry, random_arena

HERE, THERE = Placement(2, tuple(range(1, 10))), Placement(4, tuple(range(16, 7, -1)))
SHAPE = (2, 8)
BOUNDARIES = (256, 512, 768, 2048)


def layout(*, draft: bool, extra_rows: int = 0, page_size: int = 256) -> ArenaLayout:
    return ArenaLayout.from_geometry(make_geometry(draft=draft, extra_rows=extra_rows, page_size=page_size))


def live_bytes(arena: Arena, placement: Placement, n: int) -> dict[str, bytes]:
    live = live_positions(n, arena.layout.window, slot_names(arena.layout))
    return {name: arena.read(arena.layout.runs(name, rows, placement)) for name, rows in live.items()}


def taken(arena: Arena, n: int, dtype: torch.dtype = torch.float32) -> tuple[Snapshot, SnapshotPoint, torch.Tensor]:
    streams = torch.arange(16, dtype=dtype).view(SHAPE) + n
    point = SnapshotPoint(n, n.to_bytes(16, "big"))
    return take_snapshot(arena, HERE, point, streams), point, streams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra_rows", [0, 1, 3, 5])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("n", BOUNDARIES)
def test_what_is_put_back_is_what_was_there(n: int, draft: bool, extra_rows: int, dtype: torch.dtype) -> None:
    """Into another slot, of another arena whose rings are longer: a ring's rows lie elsewhere there."""
    source = random_arena(layout(draft=draft), 1)
    target = random_arena(layout(draft=draft, extra_rows=extra_rows), 2)
    before = target.buffer.clone()
    snapshot, point, streams = taken(source, n, dtype)
    assert snapshot.damage(point) is None
    assert torch.equal(restore_snapshot(target, THERE, snapshot, SHAPE, dtype), streams)
    assert live_bytes(target, THERE, n) == live_bytes(source, HERE, n)
    live = live_positions(n, target.layout.window, slot_names(target.layout))
    for name, rows in live.items():
        for run in target.layout.runs(name, rows, THERE):
            before[run.offset : run.offset + run.nbytes] = target.buffer[run.offset : run.offset + run.nbytes]
    assert torch.equal(before, target.buffer), "a byte that is not live was written"


def test_pages_that_are_shorter_than_the_window_end_at_odd_places_of_the_rings() -> None:
    small = layout(draft=True, page_size=128, extra_rows=3)
    source, target = random_arena(small, 1), random_arena(small, 2)
    for n in (128, 384, 640):
        snapshot, _, _ = taken(source, n)
        restore_snapshot(target, THERE, snapshot, SHAPE, torch.float32)
        assert live_bytes(target, THERE, n) == live_bytes(source, HERE, n)


def test_the_hand_off_row_is_not_in_it() -> None:
    assert HANDOFF not in slot_names(layout(draft=True))


@pytest.mark.parametrize("draft", [False, True])
def test_its_size_is_known_before(draft: bool) -> None:
    arena = random_arena(layout(draft=draft), 1)
    for n in BOUNDARIES:
        assert taken(arena, n)[0].nbytes == snapshot_nbytes(arena.layout, 16 * 4)


@pytest.mark.parametrize("n", [0, 1, 255, 257, -256])
def test_what_is_no_boundary_is_refused(n: int) -> None:
    with pytest.raises(LayoutError, match=f"{n} tokens do not end with a page of 256"):
        take_snapshot(random_arena(layout(draft=False), 1), HERE, SnapshotPoint(n, b""), torch.zeros(SHAPE))


def test_a_snapshot_of_another_size_is_refused() -> None:
    arena = random_arena(layout(draft=True), 1)
    snapshot, _, _ = taken(arena, 256)
    for shape, dtype in (((2, 9), torch.float32), (SHAPE, torch.bfloat16)):
        with pytest.raises(LayoutError, match=f"a snapshot of {snapshot.nbytes} bytes, expected"):
            restore_snapshot(arena, THERE, snapshot, shape, dtype)
    with pytest.raises(LayoutError, match="a snapshot of"):
        restore_snapshot(random_arena(layout(draft=False), 1), THERE, snapshot, SHAPE, torch.float32)


def test_damage_is_named() -> None:
    snapshot, point, _ = taken(random_arena(layout(draft=True), 1), 512)
    other = SnapshotPoint(512, bytes(16))
    assert snapshot.damage(SnapshotPoint(256, point.key)) == "the snapshot is of 512 tokens, expected 256"
    assert f"of the prefix {point.key.hex()}, expected {other.key.hex()}" in (snapshot.damage(other) or "")
    words = "the snapshot's bytes are not those that were taken"
    for place in (0, snapshot.nbytes // 2, snapshot.nbytes - 1):
        data = bytearray(snapshot.data)
        data[place] ^= 1
        assert replace(snapshot, data=bytes(data)).damage(point) == words
    assert replace(snapshot, data=snapshot.data[:-1]).damage(point) == words
    for relabelled in (SnapshotPoint(256, point.key), SnapshotPoint(512, other.key)):
        assert replace(snapshot, n=relabelled.n, key=relabelled.key).damage(relabelled) == words
