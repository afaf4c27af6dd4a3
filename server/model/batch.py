"""One forward's batch: rows of several requests, and where each layer kind finds what those rows read and write.

Everything here is index arithmetic, done once per forward on the CPU; the layers only gather, compute and scatter. A
GPU gets all of it in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from server.cache.device import moved
from server.cache.layout import ArenaLayout, Placement
from server.model.config import CSA, HCA

ENTRY_BLOCK = 64
"""Compressed entries are scored and attended in blocks of this many: fixed shapes, whatever the context length."""

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Segment:
    """A run of one request's tokens: ``token_ids`` at positions ``start ..``, whose state lies in ``placement``.

    Window rows before position ``valid_from`` were never written and are not read.
    """

    token_ids: Sequence[int]
    start: int
    placement: Placement
    valid_from: int = 0


@dataclass(frozen=True)
class RingGather:
    """How to read logical rows that lie partly in a slot ring and partly among this forward's own rows.

    Source rows are ``[ring rows named by hist | own rows]``. ``hist[0]`` is a row of slot 0, which is zero: absent rows
    read it.
    """

    hist: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True)
class RingWrite:
    """``ring[slot_rows] = own[own_rows]``: the last ring-length rows of each segment. ``own_rows`` None: the first
    ones.
    """

    slot_rows: torch.Tensor
    own_rows: torch.Tensor | None


@dataclass(frozen=True)
class EntryPlan:
    """Compressed entries that this forward closes, padded to whole row tiles; only the first ``count`` are real.

    ``prev`` (CSA only) gathers the A halves of the window before, ``cur`` the window itself. ``has_prev`` ``[entries]``
    is false for entry 0. ``positions`` are the entries' rope positions; ``pages`` and ``rows`` where the real ones are
    stored.
    """

    count: int
    prev: RingGather | None
    cur: RingGather
    has_prev: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class EntryTable:
    """Where a row finds compressed entries, each ``[rows, entries]``: page ids, rows in the page, and whether it sees
    them.

    As many entries as the row that sees most needs, in whole blocks, at least one. What a row does not see leads to
    page 0, which is zero.
    """

    pages: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor

    def pick(self, entries: torch.Tensor, seen: torch.Tensor) -> EntryTable:
        """The table of chosen ``entries`` ``[rows, k]``; where ``seen`` is false the choice is void."""
        columns = entries.clamp(max=self.mask.shape[1] - 1)
        return EntryTable(self.pages.gather(1, columns) * seen, self.rows.gather(1, columns) * seen, seen)

    def part(self, rows: slice, entries: slice) -> EntryTable:
        return EntryTable(self.pages[rows, entries], self.rows[rows, entries], self.mask[rows, entries])


@dataclass(frozen=True)
class CompressedView:
    """What a compressed layer kind needs: state writes, entries to close, and the entries each row may read."""

    write: RingWrite
    phase: torch.Tensor
    """Position inside its compression window of each row, ``[rows]``."""
    close: EntryPlan | None
    max_visible: int
    """Entries that the row which sees most of them sees."""
    entries: EntryTable


@dataclass(frozen=True)
class Batch:
    """Index tensors of one forward. ``n_rows`` real rows, padded to whole row tiles in deterministic mode."""

    n_rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    window: RingGather
    window_mask: torch.Tensor
    """``[rows, W]``: false where there is no such position, or none before ``valid_from``."""
    swa_write: RingWrite
    csa: CompressedView | None
    hca: CompressedView | None
    last_rows: torch.Tensor
    """The last row of each segment."""


def build_batch(segments: Sequence[Segment], layout: ArenaLayout, row_tile: int, device: torch.device) -> Batch:
    """Plans a forward over ``segments``. Padding rows belong to request 0: slot 0, page 0, position 0."""
    return _Builder(segments, layout, row_tile, device).build("swa", compressed=True)


def build_draft_batch(segments: Sequence[Segment], layout: ArenaLayout, row_tile: int, device: torch.device) -> Batch:
    """Plans a forward of the draft layer: a window of its own and nothing compressed."""
    return _Builder(segments, layout, row_tile, device).build("draft_swa", compressed=False)


class _Builder:
    def __init__(self, segments: Sequence[Segment], layout: ArenaLayout, row_tile: int, device: torch.device) -> None:
        self.layout, self.device, self.row_tile = layout, device, row_tile
        lengths = [len(s.token_ids) for s in segments]
        self.n_rows = sum(lengths)
        padding = -self.n_rows % row_tile if row_tile else 0
        self.n_real = len(segments)
        self.start = np.array([s.start for s in segments] + [0] * padding, dtype=np.int64)
        self.length = np.array(lengths + [1] * padding, dtype=np.int64)
        self.slot = np.array([s.placement.slot for s in segments] + [0] * padding, dtype=np.int64)
        self.valid_from = np.array([s.valid_from for s in segments] + [0] * padding, dtype=np.int64)
        self.row_start = np.cumsum(self.length) - self.length
        self.segment = np.repeat(np.arange(len(self.length)), self.length)
        n_all = self.n_rows + padding
        self.token_ids = np.zeros(n_all, dtype=np.int64)
        self.token_ids[: self.n_rows] = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in segments])
        self.positions = np.arange(n_all) - self.row_start[self.segment] + self.start[self.segment]
        n_pages = max(len(s.placement.pages) for s in segments)
        self.page_table = np.zeros((len(self.length), n_pages), dtype=np.int64)
        for i, segment in enumerate(segments):
            self.page_table[i, : len(segment.placement.pages)] = segment.placement.pages

    def build(self, swa: str, *, compressed: bool) -> Batch:
        window = self.layout.window
        reach = np.arange(window) - (window - 1)
        wanted = self.positions[: self.n_rows, None] + reach
        segment = self.segment[: self.n_rows]
        names = self.layout.names
        batch = Batch(
            n_rows=self.n_rows,
            token_ids=self._tensor(self.token_ids),
            positions=self._tensor(self.positions),
            window=self._ring_gather(swa, window - 1, segment, wanted),
            window_mask=self._tensor(wanted >= self.valid_from[segment][:, None]),
            swa_write=self._ring_write(swa),
            csa=self._compressed(CSA, "c4_kv", "c4_state_a") if compressed and "c4_kv" in names else None,
            hca=self._compressed(HCA, "c128_kv", "c128_state") if compressed and "c128_kv" in names else None,
            last_rows=self._tensor((self.row_start + self.length - 1)[: self.n_real]),
        )
        return moved(batch, self.device)

    def _compressed(self, ratio: int, entries: str, state: str) -> CompressedView:
        visible = (self.positions[: self.n_rows] + 1) // ratio
        return CompressedView(
            write=self._ring_write(state),
            phase=self._tensor(self.positions % ratio),
            close=self._closing(ratio, entries, state),
            max_visible=int(visible.max()),
            entries=self._entries(visible, self.layout.component(entries).rows),
        )

    def _entries(self, visible: Ints, per_page: int) -> EntryTable:
        entry = np.arange(max(1, -(-int(visible.max()) // ENTRY_BLOCK)) * ENTRY_BLOCK)
        mask = entry < visible[:, None]
        page = np.minimum(entry // per_page, self.page_table.shape[1] - 1)
        pages = np.where(mask, self.page_table[self.segment[: self.n_rows]][:, page], 0)
        return EntryTable(self._tensor(pages), self._tensor(np.where(mask, entry % per_page, 0)), self._tensor(mask))

    def _closing(self, ratio: int, entries: str, state: str) -> EntryPlan | None:
        real = slice(0, self.n_real)
        first = self.start[real] // ratio
        stop = (self.start[real] + self.length[real]) // ratio
        counts = stop - first
        total = int(counts.sum())
        if total == 0:
            return None
        segment = np.repeat(np.arange(self.n_real), counts)
        entry = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        per_page = self.layout.component(entries).rows
        pages = self.page_table[segment, entry // per_page]
        rows = entry % per_page
        padding = -total % self.row_tile if self.row_tile else 0
        segment = np.pad(segment, (0, padding))
        positions = np.pad(entry * ratio, (0, padding), constant_values=-ratio * 2)
        offsets = np.arange(ratio)
        current = positions[:, None] + offsets
        reach = (2 * ratio if ratio == CSA else ratio) - 1
        return EntryPlan(
            count=total,
            prev=self._ring_gather(state, reach, segment, current - ratio) if ratio == CSA else None,
            cur=self._ring_gather(state, reach, segment, current),
            has_prev=self._tensor(positions > 0),
            positions=self._tensor(np.maximum(positions, 0)),
            pages=self._tensor(pages),
            rows=self._tensor(rows),
        )

    def _ring_gather(self, name: str, reach: int, segment: Ints, wanted: Ints) -> RingGather:
        """Plans a read of positions ``wanted`` ``[rows, k]`` of each row's segment, at most ``reach`` before the
        segment's start.
        """
        ring = self.layout.component(name).rows
        old = self.start[:, None] - reach + np.arange(reach)
        slot_rows = np.where(old >= 0, self.slot[:, None] * ring + old % ring, 0)
        hist = np.concatenate([np.zeros(1, dtype=np.int64), slot_rows.ravel()])
        start = self.start[segment][:, None]
        from_own = len(hist) + self.row_start[segment][:, None] + wanted - start
        from_ring = 1 + segment[:, None] * reach + wanted - start + reach
        index = np.where(wanted >= start, from_own, from_ring)
        return RingGather(
            self._tensor(hist), self._tensor(np.where(wanted >= self.valid_from[segment][:, None], index, 0))
        )

    def _ring_write(self, name: str) -> RingWrite:
        ring = self.layout.component(name).rows
        rows = np.arange(self.n_rows)
        segment = self.segment[: self.n_rows]
        ends = self.row_start + self.length
        kept = rows[rows >= ends[segment] - ring]
        slot_rows = self.slot[self.segment[kept]] * ring + self.positions[kept] % ring
        return RingWrite(self._tensor(slot_rows), None if len(kept) == self.n_rows else self._tensor(kept))

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))
