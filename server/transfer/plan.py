"""The copy plan: which bytes of the prefill node's arena go where in the decode node's, paired by logical position.

Each side has its own rings, pages and slots; only logical rows (compressed entries, token positions) are shared. Pieces
that are neighbours on both sides are merged, so a full page is one piece, and so is a run of pages that are adjacent on
both sides.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.cache.layout import ArenaLayout, Placement
from server.cache.live import live_positions
from server.cache.specs import LayoutError, Scope
from server.transfer.protocol import Sent


@dataclass(frozen=True)
class Copy:
    """``nbytes`` from byte ``src`` of the source arena to byte ``dst`` of the target arena.

    ``component`` names it in errors.
    """

    component: str
    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True)
class Rows:
    """Logical rows ``start .. stop - 1`` of one component, of which ``nbytes`` are written; ``held_nbytes`` are there
    already.
    """

    component: str
    start: int
    stop: int
    nbytes: int
    held_nbytes: int = 0


@dataclass(frozen=True)
class Push:
    """One batch: its copies, and which rows they cover. ``rows`` may be empty for a component (``start == stop``)."""

    copies: tuple[Copy, ...]
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class Side:
    """One process's arena and where the request lies in it."""

    layout: ArenaLayout
    placement: Placement


class CopyPlan:
    """How one request's live state gets from ``source`` to ``target`` after a prompt of ``n`` tokens.

    ``components`` are the names to copy. What lies in slots is planned at once, pages when they are asked for. Pages
    that are ``held`` have the same bytes on the target already: their rows are claimed, and not copied.

    Raises :class:`LayoutError` for a placement that cannot hold them.
    """

    def __init__(self, source: Side, target: Side, n: int, components: Sequence[str]) -> None:
        if source.layout.page_size != target.layout.page_size:
            raise LayoutError(f"page size {source.layout.page_size} cannot be copied to {target.layout.page_size}")
        self._source, self._target, self._n = source, target, n
        self._live = live_positions(n, source.layout.window, components)
        for side in (source, target):
            check_holds(side, n, components)
        self._page_names = [c.name for c in source.layout.page_components if c.name in self._live]
        """The page components of the plan, in their order inside a page block."""
        slots = {name: rows for name, rows in self._live.items() if name not in self._page_names}
        self._slots = self._push(slots.items(), slots, {})

    def full_pages(self, first: int, last: int, held: Container[int] = ()) -> Push:
        """The pages ``first .. last - 1`` of the request, each completely filled by the prompt: whole page blocks."""
        page_size = self._source.layout.page_size
        if not 0 <= first <= last <= self._n // page_size:
            raise LayoutError(f"pages {first} .. {last} of a prompt of {self._n} tokens are not full pages")
        return self._pages(first, last, held)

    def tail(self, pages_sent: int, held: Container[int] = ()) -> Push:
        """Everything after the first ``pages_sent`` pages: other pages, the part-filled one, rings, hand-off row."""
        pages = self._pages(pages_sent, -(-self._n // self._source.layout.page_size), held)
        return Push(pages.copies + self._slots.copies, pages.rows + self._slots.rows)

    def _pages(self, first: int, last: int, held: Container[int]) -> Push:
        names = self._page_names
        spans = {name: self._entries_of_pages(name, first, last) for name in names}
        n_held = dict.fromkeys(names, 0)
        to_copy: list[tuple[str, range]] = []
        for page in range(first, last):
            for name in names:
                rows = self._entries_of_pages(name, page, page + 1)
                if page in held:
                    n_held[name] += len(rows)
                else:
                    to_copy.append((name, rows))
        return self._push(to_copy, spans, n_held)

    def _entries_of_pages(self, name: str, first: int, last: int) -> range:
        """Live entries of a page component on pages ``first .. last - 1``."""
        per_page, live = self._source.layout.component(name).rows, self._live[name]
        start = min(first * per_page, live.stop)
        return range(start, max(start, min(last * per_page, live.stop)))

    def _push(
        self, segments: Iterable[tuple[str, range]], spans: Mapping[str, range], n_held: Mapping[str, int]
    ) -> Push:
        """``segments`` are copied; ``spans`` are claimed, of each ``n_held`` rows as held."""
        copies = _merge(copy for name, rows in segments for copy in self._copies(name, rows))
        covered = []
        for name, rows in spans.items():
            row_nbytes, held = self._source.layout.component(name).row_nbytes, n_held.get(name, 0)
            covered.append(Rows(name, rows.start, rows.stop, (len(rows) - held) * row_nbytes, held * row_nbytes))
        return Push(tuple(copies), tuple(covered))

    def _copies(self, name: str, rows: range) -> Iterator[Copy]:
        """``rows`` cut wherever either side's ring wraps or page ends."""
        source, target = self._source.layout.component(name), self._target.layout.component(name)
        start = rows.start
        while start < rows.stop:
            stop = min(rows.stop, start + source.rows - start % source.rows, start + target.rows - start % target.rows)
            yield Copy(
                name,
                self._source.layout.row_offset(name, self._source.placement, start),
                self._target.layout.row_offset(name, self._target.placement, start),
                (stop - start) * source.row_nbytes,
            )
            start = stop


def check_holds(side: Side, n: int, components: Sequence[str]) -> None:
    """That a request of ``n`` tokens fits where ``side`` says it lies: ids inside the arena, long rings, enough pages.

    Raises :class:`LayoutError` that names the component.
    """
    for name, rows in live_positions(n, side.layout.window, components).items():
        component, placement = side.layout.component(name), side.placement
        is_slot = component.scope is Scope.SLOT
        items = placement.items(component)
        if len(set(items)) != len(items) or not all(1 <= item < component.items for item in items):
            raise LayoutError(f"{name}: items {items[:8]} are not distinct ids in 1 .. {component.items - 1}", name)
        held = component.rows * len(items)
        needed = len(rows) if is_slot else rows.stop
        if needed > held:
            raise LayoutError(f"{name}: {needed} live rows do not fit into {held}", name)


def _merge(copies: Iterable[Copy]) -> list[Copy]:
    """Joins copies that follow each other on both sides; the order is kept."""
    merged: list[Copy] = []
    for copy in copies:
        last = merged[-1] if merged else None
        if last is not None and last.src + last.nbytes == copy.src and last.dst + last.nbytes == copy.dst:
            name = last.component if last.component == copy.component else "pages"
            merged[-1] = Copy(name, last.src, last.dst, last.nbytes + copy.nbytes)
        else:
            merged.append(copy)
    return merged


@dataclass(frozen=True)
class CoverageError:
    """The first component whose claim is not exactly its live rows, or not their bytes."""

    component: str
    reason: str


def check_coverage(sent: Sequence[Sent], live: Mapping[str, range]) -> CoverageError | None:
    """Whether a ``Done`` covers every live row of all components exactly once.

    The receiver's own ``live`` ranges decide, never the sender's numbers.
    """
    claims: dict[str, Sent] = {}
    for claim in sent:
        if claim.component in claims:
            return CoverageError(claim.component, "is claimed twice")
        claims[claim.component] = claim
    for name, rows in live.items():
        found = claims.pop(name, None)
        if found is None:
            return CoverageError(name, "is not in Done")
        if (found.start, found.stop) != (rows.start, rows.stop) and (len(rows) or found.start != found.stop):
            return CoverageError(
                name, f"rows {found.start} .. {found.stop} were sent, {rows.start} .. {rows.stop} are live"
            )
    if claims:
        return CoverageError(next(iter(claims)), "was sent but not asked for")
    return None


def check_nbytes(sent: Sequence[Sent], nbytes: Mapping[str, int]) -> CoverageError | None:
    """Whether every claim of a ``Done`` has the byte count of its component's live rows here."""
    for claim in sent:
        if claim.component in nbytes and claim.nbytes != nbytes[claim.component]:
            return CoverageError(claim.component, f"{claim.nbytes} bytes were sent, {nbytes[claim.component]} are live")
    return None
