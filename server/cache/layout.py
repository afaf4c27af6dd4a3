"""Where every row of every component lies in an arena.

Computed from plain numbers, so that a peer's arena is described in the same way as one's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from server.cache.live import live_positions
from server.cache.specs import CacheGeometry, ComponentSpec, LayoutError, Scope

PROBE_NBYTES = 4096
"""Size of the probe region at the start of every arena (readiness probes write there, never into state)."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Placement:
    """The memory of one request: its slot id and its page ids, page j holding positions ``j * page_size ..``.

    The first ``read_only`` pages are complete and may be others' too: nothing may be computed into them.
    """

    slot: int
    pages: tuple[int, ...]
    read_only: int = 0

    @cached_property
    def page_ids(self) -> npt.NDArray[np.int64]:
        """``pages`` as an array, which is copied into every step's page table."""
        return np.array(self.pages, dtype=np.int64)

    def items(self, component: ComponentLayout) -> tuple[int, ...]:
        """The ids of the items that hold the rows of ``component``, in ascending position."""
        return (self.slot,) if component.scope is Scope.SLOT else self.pages


@dataclass(frozen=True)
class Run:
    """A contiguous byte range of the arena."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class ComponentLayout:
    """One component's place in an arena: row r of item i starts at ``offset + i * item_stride + r * row_nbytes``.

    ``rows`` is the rows per item: the ring of a slot component, the entries of a page. ``items`` counts item 0 too.
    """

    name: str
    scope: Scope
    positions: int
    layer_ids: tuple[int, ...]
    width: int
    dtype: str
    row_nbytes: int
    rows: int
    items: int
    offset: int
    item_stride: int


@dataclass(frozen=True)
class ArenaLayout:
    """The map of one arena: ``[probe | slot component | ... | page 0 | page 1 | ...]``.

    A page is one block ``[c4_kv | c4_index | c128_kv]`` without padding, so a full page is one range and neighbours
    merge. The same class describes this process's arena and, from the peer's manifest, the peer's.
    """

    page_size: int
    window: int
    nbytes: int
    components: tuple[ComponentLayout, ...]

    @staticmethod
    def from_geometry(geometry: CacheGeometry) -> ArenaLayout:
        """Lays out a new arena for ``geometry``."""
        page_size = geometry.page_size
        placed: dict[str, ComponentLayout] = {}

        def place(spec: ComponentSpec, items: int, offset: int, item_stride: int) -> None:
            placed[spec.name] = ComponentLayout(
                spec.name, spec.scope, spec.positions, spec.layer_ids, spec.width, spec.dtype,
                spec.row_nbytes, spec.rows_per_item(page_size), items, offset, item_stride,
            )  # fmt: skip

        cursor = PROBE_NBYTES
        for spec in geometry.components:
            if spec.scope is Scope.SLOT:
                stride = spec.ring * spec.row_nbytes
                place(spec, geometry.slots, cursor, stride)
                cursor = _align(cursor + stride * geometry.slots)
        paged = [spec for spec in geometry.components if spec.scope is Scope.PAGE]
        page_nbytes = sum(spec.row_nbytes * spec.rows_per_item(page_size) for spec in paged)
        in_page = cursor
        for spec in paged:
            place(spec, geometry.pages, in_page, page_nbytes)
            in_page += spec.rows_per_item(page_size) * spec.row_nbytes
        nbytes = cursor + page_nbytes * geometry.pages
        ordered = tuple(placed[spec.name] for spec in geometry.components)
        return ArenaLayout(page_size, geometry.window, nbytes, ordered)

    @cached_property
    def _by_name(self) -> dict[str, ComponentLayout]:
        return {component.name: component for component in self.components}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self.components)

    @cached_property
    def page_components(self) -> tuple[ComponentLayout, ...]:
        """Page components in their order inside a page block."""
        return tuple(sorted((c for c in self.components if c.scope is Scope.PAGE), key=lambda c: c.offset))

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page block, which is also the stride from page to page (0 if the model compresses nothing)."""
        return self.page_components[0].item_stride if self.page_components else 0

    def component(self, name: str) -> ComponentLayout:
        if name not in self._by_name:
            raise LayoutError(f"no component named {name!r}; there are {', '.join(self._by_name)}")
        return self._by_name[name]

    def row_offset(self, name: str, placement: Placement, row: int) -> int:
        """Byte offset of logical row ``row`` (entry or token position) of a component for one request."""
        c = self.component(name)
        items = placement.items(c)
        if c.scope is Scope.SLOT:
            return c.offset + items[0] * c.item_stride + (row % c.rows) * c.row_nbytes
        page, local = divmod(row, c.rows)
        if page >= len(items):
            raise LayoutError(f"{name} entry {row} lies on page {page} of the request, which has {len(items)} pages")
        return c.offset + items[page] * c.item_stride + local * c.row_nbytes

    def runs(self, name: str, live: range, placement: Placement) -> list[Run]:
        """The byte ranges of rows ``live`` of a component in ascending logical order, neighbours merged.

        Raises :class:`LayoutError` if a ring is too short to hold ``live`` or the placement has too few pages.
        """
        c = self.component(name)
        if c.scope is Scope.SLOT and len(live) > c.rows:
            raise LayoutError(f"{name} has {len(live)} live rows but a ring of {c.rows}")
        return merge_runs(
            Run(self.row_offset(name, placement, start), (stop - start) * c.row_nbytes)
            for start, stop in _pieces_between_wraps(live, c.rows)
        )

    def live_runs(self, n: int, placement: Placement) -> dict[str, list[Run]]:
        """Every component's live byte ranges after a prompt of ``n`` tokens."""
        live = live_positions(n, self.window, self.names)
        return {name: self.runs(name, rows, placement) for name, rows in live.items()}

    def live_nbytes(self, n: int) -> dict[str, int]:
        """Live bytes of each component after a prompt of ``n`` tokens: what a transfer moves, exactly."""
        live = live_positions(n, self.window, self.names)
        return {name: len(rows) * self.component(name).row_nbytes for name, rows in live.items()}


def merge_runs(runs: Iterable[Run]) -> list[Run]:
    """Joins runs that follow each other in memory; the order is kept."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].offset + merged[-1].nbytes == run.offset:
            merged[-1] = Run(merged[-1].offset, merged[-1].nbytes + run.nbytes)
        else:
            merged.append(run)
    return merged


def _pieces_between_wraps(live: range, rows: int) -> Iterator[tuple[int, int]]:
    """Splits ``live`` at multiples of ``rows``: where a ring wraps, or where a page ends."""
    start = live.start
    while start < live.stop:
        stop = min(live.stop, (start // rows + 1) * rows)
        yield start, stop
        start = stop


def _align(offset: int) -> int:
    return (offset + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
