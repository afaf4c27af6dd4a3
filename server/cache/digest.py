"""Digests over live bytes, in ascending logical position with the layers inside.

Both sides get the same ones, whatever their rings and ids are. They compose: each page, and each slot, has a digest of
its own for every component, and a component's digest is taken over these. So a page's part is taken as soon as the page
is complete, and never again.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def take_pages(self, n_computed: int) -> None:
        """Takes the digests of the pages that ``n_computed`` positions fill, and that were not taken before."""
        self._take_until(min(n_computed, self._n) // self._page_size)

    def finish(self) -> dict[str, int]:
        """Takes all that is left; one digest for each component."""
        self._take_until(self._n_pages)
        for name, runs in self._slotted:
            if runs:
                self._parts[name][:] = _digest(self._arena, *runs)
        return {name: xxhash.xxh3_64_intdigest(bytes(parts)) for name, parts in self._parts.items()}

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
    return StateDigests(arena, n, placement, names).finish()


def _digest(arena: Arena, first: Run, *runs: Run) -> bytes:
    """xxh3_64 over the bytes of the runs in order, little-endian."""
    digest = xxhash.xxh3_64(arena.memory(first))
    for run in runs:
        digest.update(arena.memory(run))
    return digest.intdigest().to_bytes(8, "little")
