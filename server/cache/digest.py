"""Digests over live bytes, in ascending logical position with the layers inside.

Both sides get the same ones, whatever their rings and ids are. They compose: each page, and each slot, has a digest of
its own for every component, and a component's digest is taken over these. So a page's part is taken as soon as the page
is complete, and never again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from server.cache.arena import Arena
from server.cache.layout import ComponentLayout, Placement, Run
from server.cache.live import live_positions
from server.cache.specs import LayoutError, Scope


@dataclass(frozen=True)
class _Paged:
    """The live entries of one page component: all up to ``stop``, on the pages ``items``."""

    component: ComponentLayout
    items: tuple[int, ...]
    stop: int

    def run(self, page: int) -> Run | None:
        """Where the live entries of the request's page ``page`` are, if it has any."""
        c = self.component
        n_rows = min(c.rows, self.stop - page * c.rows)
        if n_rows <= 0:
            return None
        return Run(c.offset + self.items[page] * c.item_stride, n_rows * c.row_nbytes)


PageRanges = tuple[tuple[int, int], ...]
"""Pages ``first .. stop - 1`` of a request, again and again: ascending, and not touching each other."""


@dataclass(frozen=True)
class StateParts:
    """The digests of one request's live state, part by part: of each component 8 bytes (xxh3_64, little-endian) for
    each page, or for the slot. ``paged`` are the names of the page components.
    """

    parts: Mapping[str, bytes]
    paged: frozenset[str]

    def digests(self) -> dict[str, int]:
        """One for each component, over all of its parts."""
        return {name: xxhash.xxh3_64_intdigest(parts) for name, parts in self.parts.items()}

    def split(self, name: str, held: PageRanges) -> tuple[int, int]:
        """The digests of a component's parts that are not in the pages ``held``, and of those that are."""
        parts = self.parts[name]
        if name not in self.paged or not held:
            return xxhash.xxh3_64_intdigest(parts), NOTHING
        there = b"".join(parts[8 * first : 8 * stop] for first, stop in held)
        edges = [0, *(edge for pair in held for edge in pair), len(parts) // 8]
        rest = b"".join(parts[8 * first : 8 * stop] for first, stop in zip(edges[::2], edges[1::2], strict=True))
        return xxhash.xxh3_64_intdigest(rest), xxhash.xxh3_64_intdigest(there)


NOTHING = xxhash.xxh3_64_intdigest(b"")
"""The digest of no part."""


class StateDigests:
    """The digests of one request's live state after a prompt of ``n`` tokens, taken part by part.

    Of every component of the arena, or of those in ``names``. Raises :class:`LayoutError` for a placement that cannot
    hold them. Where the parts lie is found out here, so that little is left to do when the last byte has come.
    """

    def __init__(self, arena: Arena, n: int, placement: Placement, names: Iterable[str] | None = None) -> None:
        self._arena, self._n, self._page_size = arena, n, arena.layout.page_size
        self._n_pages = -(-n // self._page_size)
        self._parts: dict[str, bytearray] = {}
        """The digests of each component's pages, or of its slot, 8 bytes each."""
        self._paged: list[_Paged] = []
        self._slotted: list[tuple[str, list[Run]]] = []
        self._taken = 0
        """Pages of which the digests are taken."""
        layout = arena.layout
        for name, rows in live_positions(n, layout.window, layout.names if names is None else names).items():
            component = layout.component(name)
            self._parts[name] = bytearray()
            if component.scope is Scope.SLOT:
                self._slotted.append((name, layout.runs(name, rows, placement)))
                continue
            items = placement.items(component)
            if len(items) * component.rows < rows.stop:
                raise LayoutError(f"{name}: {rows.stop} live entries do not fit on {len(items)} pages", name)
            self._paged.append(_Paged(component, items, rows.stop))

    def take_pages(self, n_computed: int) -> tuple[bytes, ...]:
        """Takes the digests of the pages that ``n_computed`` positions fill, and that were not taken before. Of each of
        them, in order, the page digest.
        """
        first = self._taken
        self._take_until(min(n_computed, self._n) // self._page_size)
        return tuple(self.page_digest(page) for page in range(first, self._taken))

    def page_digest(self, page: int) -> bytes:
        """The digest of the request's complete page ``page``, which was taken before: xxh3_64 over the digests of its
        components in the order of their names, 8 bytes, little-endian.
        """
        parts = (
            self._parts[name][8 * page : 8 * page + 8] for name in sorted(each.component.name for each in self._paged)
        )
        return xxhash.xxh3_64_intdigest(b"".join(parts)).to_bytes(8, "little")

    def finish(self) -> StateParts:
        """Takes all that is left."""
        self._take_until(self._n_pages)
        for name, runs in self._slotted:
            if runs:
                self._parts[name][:] = _digest(self._arena, *runs)
        return StateParts(
            {name: bytes(parts) for name, parts in self._parts.items()},
            frozenset(p.component.name for p in self._paged),
        )

    def _take_until(self, n_pages: int) -> None:
        for page in range(self._taken, n_pages):
            for paged in self._paged:
                if (run := paged.run(page)) is not None:
                    self._parts[paged.component.name] += _digest(self._arena, run)
        self._taken = max(self._taken, n_pages)


def live_digests(arena: Arena, n: int, placement: Placement, names: Iterable[str] | None = None) -> dict[str, int]:
    """One digest per component (all of the arena's, or those in ``names``) over its live bytes after ``n`` prompt
    tokens, all taken now.
    """
    return StateDigests(arena, n, placement, names).finish().digests()


def _digest(arena: Arena, first: Run, *runs: Run) -> bytes:
    """xxh3_64 over the bytes of the runs in order, little-endian."""
    digest = xxhash.xxh3_64(arena.memory(first))
    for run in runs:
        digest.update(arena.memory(run))
    return digest.intdigest().to_bytes(8, "little")
