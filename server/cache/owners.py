"""Owner stamps: which room every slot and page belongs to, kept apart from the allocator's own book.

The allocator says what it granted; a stamp says what a piece of memory is being used for. Whoever reads or sends a
component's rows compares the stamps of the items they lie in, so that a slot or page of another request is noticed
before its bytes count as anybody's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from server.cache.layout import ArenaLayout, Placement
from server.cache.live import live_positions
from server.cache.specs import LayoutError, Scope
from server.failure import Failure


@dataclass(frozen=True)
class Owner:
    """One reservation attempt of one request."""

    room: int
    epoch: int

    def __str__(self) -> str:
        return f"room {self.room} epoch {self.epoch}"


class WrongOwner(LayoutError):
    """Rows of ``component`` lie in memory of another room, or of none."""

    @property
    def failure(self) -> Failure:
        """What the room ends with."""
        return Failure("wrong_owner", str(self), self.component, "stamp")


class LiveItems(NamedTuple):
    """The slot, or the pages, that hold live rows of ``component``."""

    component: str
    scope: Scope
    items: Sequence[int]


class OwnerStamps:
    """The stamps of one arena. Written by the thread that grants memory, read by every thread that uses it."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._stamps: dict[tuple[Scope, int], Owner] = {}
        self._readers: dict[int, Counter[Owner]] = {}
        """Of each page that is the cache's, or was it when they began to read. Two rooms may have one name here: those
        of two decode nodes.
        """
        self._unshared: set[int] = set()
        """Pages with readers that are the cache's no more."""

    def stamp(self, placement: Placement, owner: Owner) -> None:
        """Marks a grant. Memory that somebody still owns keeps its stamp: :meth:`check` then fails the newcomer. Of a
        page of the cache ``owner`` is one reader more.
        """
        for scope, item in _items(placement):
            if scope is Scope.PAGE and item in self._readers:
                self._readers[item][owner] += 1
            else:
                self._stamps.setdefault((scope, item), owner)

    def clear(self, placement: Placement, owner: Owner) -> None:
        """Takes ``owner``'s stamps off at its release; those of others stay."""
        for scope, item in _items(placement):
            if scope is Scope.PAGE and item in self._readers:
                self._readers[item] -= Counter({owner: 1})
                self._forget_if_over(item)
            elif self._stamps.get((scope, item)) == owner:
                del self._stamps[scope, item]

    def share(self, page: int, owner: Owner) -> None:
        """The page becomes the cache's, and ``owner`` its first reader.

        Raises :class:`LayoutError` if the page is another's: what is shared would be that one's.
        """
        found = self._stamps.get((Scope.PAGE, page))
        if found != owner:
            raise LayoutError(f"page {page} belongs to {found or 'nobody'}, expected {owner}")
        self._readers[page] = Counter({owner: 1})  # before the stamp is off: another thread may be looking
        self._unshared.discard(page)
        del self._stamps[Scope.PAGE, page]

    def unshare(self, page: int) -> None:
        """The page is the cache's no more: nobody can begin to read it."""
        self._unshared.add(page)
        self._forget_if_over(page)

    def _forget_if_over(self, page: int) -> None:
        if page in self._unshared and not self._readers[page]:
            del self._readers[page]
            self._unshared.remove(page)

    def owner_of(self, scope: Scope, item: int) -> Owner | None:
        """The one owner; None for what is nobody's, and for pages of the cache."""
        return self._stamps.get((scope, item))

    def readers_of(self, page: int) -> frozenset[Owner] | None:
        """Who reads a page of the cache; None for any other."""
        readers = self._readers.get(page)
        return None if readers is None else frozenset(readers)

    def check(self, n: int, placement: Placement, names: Iterable[str], owner: Owner) -> None:
        """That every slot and page which holds a live row of ``names`` after ``n`` tokens is ``owner``'s.

        Raises :class:`WrongOwner` that names the first component of which one is not, and both owners.
        """
        self.check_items(self.items_of(n, placement, names), owner)

    def items_of(self, n: int, placement: Placement, names: Iterable[str]) -> list[LiveItems]:
        """The slots and pages that hold a live row of ``names`` after ``n`` tokens, as a few slices."""
        found = []
        for name, rows in live_positions(n, self._layout.window, names).items():
            component = self._layout.component(name)
            items = placement.items(component)
            if component.scope is Scope.PAGE:
                items = items[: -(-rows.stop // component.rows)]
            if len(rows):
                found.append(LiveItems(name, component.scope, items))
        return found

    def check_items(self, items: Iterable[LiveItems], owner: Owner) -> None:
        """That all ``items`` are ``owner``'s. Raises what :meth:`check` raises."""
        for name, scope, those in items:
            for item in those:
                found = self._stamps.get((scope, item))
                if found != owner and (scope is Scope.SLOT or owner not in self._readers.get(item, ())):
                    raise WrongOwner(f"{name}: {scope} {item} belongs to {found or 'nobody'}, expected {owner}", name)


def _items(placement: Placement) -> list[tuple[Scope, int]]:
    return [(Scope.SLOT, placement.slot), *((Scope.PAGE, page) for page in placement.pages)]
