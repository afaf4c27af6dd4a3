"""Snapshots: the slot state of a prefix at a page boundary, packed, so that a longer prompt can be computed from there.

A page hit says nothing about the sliding window, the compressors' open windows and the draft's window at the boundary.
Computing the last W tokens again does not give their bits (a window row depends on all layers below, each W - 1 tokens
further back), so they are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash

from server.cache.arena import Arena
from server.cache.capacity import slot_names
from server.cache.layout import Placement, Run
from server.cache.live import live_positions
from server.cache.specs import LayoutError


@dataclass(frozen=True)
class SnapshotPoint:
    """A page boundary at which a snapshot is wanted: after ``n`` tokens, the last page of which has content key
    ``key``.
    """

    n: int
    key: bytes


@dataclass(frozen=True)
class Snapshot:
    """The live slot rows after ``n`` tokens, component by component in the order of the arena's layout and without the
    hand-off row (it is the room's own), then the target's hidden streams of position n - 1.

    ``key`` is that of the last page before ``n``. ``digest`` is xxh3_64 over key, n (8 bytes, little-endian) and data.
    """

    n: int
    key: bytes
    data: bytes
    digest: int

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def damage(self, point: SnapshotPoint) -> str | None:
        """What is wrong with it as the state at ``point``; None if nothing is."""
        if self.n != point.n:
            return f"the snapshot is of {self.n} tokens, expected {point.n}"
        if self.key != point.key:
            return f"the snapshot is of the prefix {self.key.hex()}, expected {point.key.hex()}"
        if self.digest != _digest(point, self.data):
            return "the snapshot's bytes are not those that were taken"
        return None


def take_snapshot(arena: Arena, placement: Placement, point: SnapshotPoint, streams: torch.Tensor) -> Snapshot:
    """Packs the slot's live rows after ``point.n`` tokens and ``streams`` ``[N, D]`` of the position before.

    Everything that was computed must be done. Raises :class:`LayoutError` for a boundary that is none.
    """
    if point.n < 1 or point.n % arena.layout.page_size:
        raise LayoutError(f"{point.n} tokens do not end with a page of {arena.layout.page_size}")
    runs = _runs(arena, placement, point.n)
    data = arena.read(runs) + streams.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return Snapshot(point.n, point.key, data, _digest(point, data))


def restore_snapshot(
    arena: Arena, placement: Placement, snapshot: Snapshot, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Writes the rows into the slot of ``placement``. Returns the streams, of ``shape`` and ``dtype``, on the CPU.

    Raises :class:`LayoutError` for a snapshot of another size.
    """
    runs = _runs(arena, placement, snapshot.n)
    n_rows = sum(run.nbytes for run in runs)
    streams_nbytes = dtype.itemsize
    for dim in shape:
        streams_nbytes *= dim
    if len(snapshot.data) != n_rows + streams_nbytes:
        raise LayoutError(f"a snapshot of {len(snapshot.data)} bytes, expected {n_rows + streams_nbytes}")
    data, start = memoryview(snapshot.data), 0
    for run in runs:
        arena.write(run, bytes(data[start : start + run.nbytes]))
        start += run.nbytes
    return torch.frombuffer(bytearray(data[start:]), dtype=dtype).view(shape)


def _runs(arena: Arena, placement: Placement, n: int) -> list[Run]:
    live = live_positions(n, arena.layout.window, slot_names(arena.layout))
    return [run for name, rows in live.items() for run in arena.layout.runs(name, rows, placement)]


def _digest(point: SnapshotPoint, data: bytes) -> int:
    digest = xxhash.xxh3_64(point.key)
    digest.update(point.n.to_bytes(8, "little"))
    digest.update(data)
    return digest.intdigest()
