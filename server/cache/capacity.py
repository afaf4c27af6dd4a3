"""How many pages and slots fit into a number of bytes, and what requests then fit into them."""

from __future__ import annotations

from dataclasses import replace

from server.cache.layout import ArenaLayout
from server.cache.live import live_positions
from server.cache.specs import HANDOFF, CacheGeometry, ComponentSpec, LayoutError, Scope
from server.sizes import size

TOKENS_A_SLOT = 8192
"""Where pages and slots are both to be chosen: the tokens of pages that each slot gets."""
MAX_SLOTS = 256
"""More requests at once are not chosen: ``--slots`` can ask for them."""
_SLACK_NBYTES = 4096
"""Of alignment, in all."""


def page_nbytes(geometry: CacheGeometry) -> int:
    """Bytes of one page."""
    return _item_nbytes(geometry, Scope.PAGE)


def slot_nbytes(geometry: CacheGeometry) -> int:
    """Bytes of one slot."""
    return _item_nbytes(geometry, Scope.SLOT)


def item_nbytes(spec: ComponentSpec, page_size: int) -> int:
    """Bytes of one component in one page or slot."""
    return spec.row_nbytes * spec.rows_per_item(page_size)


def _item_nbytes(geometry: CacheGeometry, scope: Scope) -> int:
    return sum(item_nbytes(spec, geometry.page_size) for spec in geometry.components if spec.scope is scope)


def fitted(
    geometry: CacheGeometry, nbytes: int, longest: int, *, pages: int | None = None, slots: int | None = None
) -> CacheGeometry:
    """``geometry`` with as many pages and slots as ``nbytes`` hold; those that are given (item 0 not counted) stay.

    Neither given: a slot for every :data:`TOKENS_A_SLOT` tokens of pages, 1 .. :data:`MAX_SLOTS`; then pages take the
    rest, but not more than all slots need for requests of ``longest`` tokens each. Raises :class:`LayoutError` with the
    numbers if not even one of each fits.
    """
    page, slot = page_nbytes(geometry), slot_nbytes(geometry)
    most_pages = pages_for(longest, geometry.page_size)
    room = nbytes - ArenaLayout.from_geometry(replace(geometry, pages=2, slots=2)).nbytes + page + slot - _SLACK_NBYTES
    if slots is None and pages is None:
        share = slot + page * min(most_pages, pages_for(TOKENS_A_SLOT, geometry.page_size))
        slots = max(1, min(room // share, MAX_SLOTS))
    elif slots is None and pages is not None:
        slots = min((room - pages * page) // slot, MAX_SLOTS)
    if pages is None and slots is not None:
        most_pages *= slots
        pages = min((room - slots * slot) // page, most_pages) if page else most_pages
    if slots is None or pages is None or slots < 1 or pages < 1:
        raise LayoutError(
            f"{size(max(0, nbytes))} are left for pools, and one more page of {size(page)} and one more slot of "
            f"{size(slot)} do not fit"
        )
    return replace(geometry, pages=pages + 1, slots=slots + 1)


def pages_for(n_tokens: int, page_size: int) -> int:
    return -(-n_tokens // page_size)


def most_at_once(geometry: CacheGeometry, n_tokens: int) -> int:
    """How many requests of ``n_tokens`` (prompt and answer) can run at the same time."""
    slots, pages = geometry.slots - 1, geometry.pages - 1
    return min(slots, pages // pages_for(n_tokens + geometry.spec_tokens, geometry.page_size))


def slot_names(layout: ArenaLayout) -> tuple[str, ...]:
    """The components of a snapshot, in order."""
    return tuple(c.name for c in layout.components if c.scope is Scope.SLOT and c.name != HANDOFF)


def snapshot_nbytes(layout: ArenaLayout, streams_nbytes: int) -> int:
    """The size of a snapshot of a prefix that is longer than the window."""
    n = layout.page_size * (1 + layout.window // layout.page_size)
    live = live_positions(n, layout.window, slot_names(layout))
    return streams_nbytes + sum(len(rows) * layout.component(name).row_nbytes for name, rows in live.items())
