"""Who owns which slot and page. One thread owns an allocator; there are no locks."""

from __future__ import annotations

import enum
import heapq
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from server.cache.layout import Placement
from server.cache.specs import CacheGeometry


class AllocatorError(RuntimeError):
    """A step that a slot's or page's life does not have: a double free, a commit of nothing, a second grant."""


class ItemState(enum.StrEnum):
    """free -> reserved -> committed -> free; quarantined while somebody may still be writing.

    A complete page may be given to the cache: it is shared while requests read it, then cached, then free.
    """

    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    SHARED = "shared"
    CACHED = "cached"


@dataclass
class _Grant:
    """``own`` are the pages that nobody else may use, ``read`` those of the cache."""

    placement: Placement
    state: ItemState
    own: list[int]
    read: list[int] = field(default_factory=list)


class _FreeIds:
    """Ids, of which the first in a fixed order is handed out first."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._rank = {item: rank for rank, item in enumerate(order)}
        self._ranks = list(range(len(order)))

    def __len__(self) -> int:
        return len(self._ranks)

    def take(self) -> int:
        return self._order[heapq.heappop(self._ranks)]

    def add(self, items: Iterable[int]) -> None:
        for item in items:
            heapq.heappush(self._ranks, self._rank[item])


def _nothing_cached(n_pages: int) -> None:
    raise AllocatorError(f"nobody can evict {n_pages} pages")


def _kept_as_it_is(_placement: Placement) -> None:
    pass


def _not_told(_pages: Sequence[int]) -> None:
    pass


class Allocator:
    """Slots and pages of one process, granted together: one slot and the pages for a number of tokens, all or nothing.

    ``permute_seed`` shuffles the order in which ids are handed out (tests: nothing may depend on ids); None hands out
    ascending ids, so that a request's pages are neighbours whenever they can be. ``on_free`` is called with what
    becomes free, before anybody gets it. ``evict`` and ``on_unread`` are set by the cache that owns pages: the first
    must make that many of its pages free by :meth:`discard`, the second is told of those whose last reader is gone.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        permute_seed: int | None = None,
        on_free: Callable[[Placement], None] = _kept_as_it_is,
    ) -> None:
        self._page_size = geometry.page_size
        self._n_pages = geometry.pages - 1
        slots, pages = list(range(1, geometry.slots)), list(range(1, geometry.pages))
        if permute_seed is not None:
            rng = random.Random(permute_seed)
            rng.shuffle(slots)
            rng.shuffle(pages)
        self._free_slots, self._free_pages = _FreeIds(slots), _FreeIds(pages)
        self._grants: dict[Hashable, _Grant] = {}
        self._readers: Counter[int] = Counter()
        """Of every page that is the cache's, also of those without any."""
        self._discarded: set[int] = set()
        """Pages that the cache has given up while somebody reads them: free with the last reader."""
        self._n_cached = 0
        self._on_free = on_free
        self.evict: Callable[[int], None] = _nothing_cached
        self.on_unread: Callable[[Sequence[int]], None] = _not_told

    @property
    def capacity_tokens(self) -> int:
        """The longest request, in tokens, that an empty allocator could hold."""
        return self._n_pages * self._page_size

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._page_size)

    @property
    def n_available(self) -> int:
        """Pages that can be granted now: free, or in the cache and read by nobody."""
        return len(self._free_pages) + self._n_cached

    @property
    def n_cached(self) -> int:
        """Pages of the cache that nobody reads."""
        return self._n_cached

    @property
    def is_full(self) -> bool:
        """Whether nothing can be granted now, however little it is."""
        return not self._free_slots or not self.n_available

    def reserve(
        self, owner: Hashable, n_tokens: int, *, shared: Sequence[int] = (), pinned: Sequence[int] = ()
    ) -> Placement | None:
        """Grants one slot and the pages of ``n_tokens``; None if they are not free now.

        The first places get the cache's complete pages ``shared``, which nobody may write to. The cache's ``pinned``
        stay what they are as long as the grant. Raises :class:`AllocatorError` if ``owner`` holds a grant already, or
        for pages that the cache does not have.
        """
        if owner in self._grants:
            raise AllocatorError(f"{owner} already holds {self._grants[owner].placement}")
        n_own = self.pages_for(n_tokens) - len(shared)
        if n_own < 0:
            raise AllocatorError(f"{len(shared)} pages are more than {n_tokens} tokens need")
        read = [*shared, *pinned]
        if unknown := [page for page in read if page not in self._readers or page in self._discarded]:
            raise AllocatorError(f"pages {unknown} are not the cache's")
        n_kept = sum(not self._readers[page] for page in set(read))
        if not self._free_slots or n_own > self.n_available - n_kept:
            return None
        self._read(read)
        if (missing := n_own - len(self._free_pages)) > 0:
            self.evict(missing)
        own = [self._free_pages.take() for _ in range(n_own)]
        placement = Placement(self._free_slots.take(), (*shared, *own), read_only=len(shared))
        self._grants[owner] = _Grant(placement, ItemState.RESERVED, own, read)
        return placement

    def placement_of(self, owner: Hashable) -> Placement:
        return self._grant(owner).placement

    def state_of(self, owner: Hashable) -> ItemState:
        return self._grant(owner).state if owner in self._grants else ItemState.FREE

    def commit(self, owner: Hashable) -> None:
        """reserved -> committed: everything the next step reads is there and proved."""
        self._move(owner, ItemState.RESERVED, ItemState.COMMITTED)

    def quarantine(self, owner: Hashable) -> None:
        """reserved -> quarantined: the request is over, but its memory may still be written to."""
        self._move(owner, ItemState.RESERVED, ItemState.QUARANTINED)

    def release(self, owner: Hashable) -> None:
        """Back to free, from any other state: nobody writes or reads there any more, and the caller knows it. Pages of
        the cache stay the cache's.
        """
        grant = self._grant(owner)
        del self._grants[owner]
        self._free(grant.own, grant.placement.slot)
        self._unread(grant.read)

    # --- pages of the cache -------------------------------------------------------------------------------------------

    def give_to_cache(self, owner: Hashable, index: int) -> int:
        """The complete page at place ``index`` of ``owner``'s grant becomes the cache's, and ``owner`` its reader.

        Returns its id. Raises :class:`AllocatorError` if it is not ``owner``'s alone.
        """
        grant = self._grant(owner)
        page = grant.placement.pages[index]
        if page not in grant.own:
            raise AllocatorError(f"page {page} at place {index} is not {owner}'s own")
        grant.own.remove(page)
        grant.read.append(page)
        self._readers[page] = 1
        return page

    def settle(self, owner: Hashable, places: Mapping[int, int]) -> Placement:
        """Puts pinned pages of the cache at ``places`` (place: page) of ``owner``'s grant. The pages that were there
        become free, and so do the pins that were not put anywhere. Returns the new placement.
        """
        grant = self._grant(owner)
        pages = list(grant.placement.pages)
        replaced = [pages[place] for place in places]
        own, read = set(grant.own), set(grant.read)
        if missing := [page for page in places.values() if page not in read]:
            raise AllocatorError(f"{owner} does not hold the cached pages {missing}")
        if missing := [page for page in replaced if page not in own]:
            raise AllocatorError(f"pages {missing} are not {owner}'s own")
        for place, page in places.items():
            pages[place] = page
        kept = set(pages)
        unread = [page for page in grant.read if page not in kept]
        grant.read = [page for page in grant.read if page in kept]
        grant.own = [page for page in grant.own if page in kept]
        grant.placement = replace(grant.placement, pages=tuple(pages))
        self._free(replaced)
        self._unread(unread)
        return grant.placement

    def n_readers(self, page: int) -> int:
        """How many requests read a page of the cache."""
        return self._readers[page]

    def discard(self, page: int) -> None:
        """The cache gives ``page`` up: it is free now, or when its last reader is gone."""
        if page not in self._readers or page in self._discarded:
            raise AllocatorError(f"page {page} is not the cache's")
        if self._readers[page]:
            self._discarded.add(page)
            return
        self._n_cached -= 1
        del self._readers[page]
        self._free([page])

    def _read(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._n_cached -= not self._readers[page]
            self._readers[page] += 1

    def _unread(self, pages: Sequence[int]) -> None:
        cached: list[int] = []
        free: list[int] = []
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                (free if page in self._discarded else cached).append(page)
        self._n_cached += len(cached)
        for page in free:
            self._discarded.remove(page)
            del self._readers[page]
        self._free(free)
        if cached or free:
            self.on_unread([*cached, *free])

    def _free(self, pages: Sequence[int], slot: int = 0) -> None:
        """Slot 0 is never handed out: here it is none."""
        if not pages and not slot:
            return
        self._on_free(Placement(slot, tuple(pages)))
        self._free_slots.add([slot] if slot else [])
        self._free_pages.add(pages)

    # --- what there is ------------------------------------------------------------------------------------------------

    def grants(self) -> list[tuple[Placement, ItemState]]:
        """What is not free. A placement may have pages of the cache, which others may have too."""
        return [(grant.placement, grant.state) for grant in self._grants.values()]

    def cached_pages(self) -> dict[int, ItemState]:
        """The pages of the cache: shared, or cached."""
        return {page: ItemState.SHARED if n else ItemState.CACHED for page, n in self._readers.items()}

    def counts(self) -> dict[str, dict[str, int]]:
        """``{"slots": {state: n}, "pages": {state: n}}`` over all states; item 0 is not counted. Slots are never
        shared or cached.
        """
        slots = {state.value: 0 for state in ItemState}
        pages = dict(slots)
        slots[ItemState.FREE] = len(self._free_slots)
        pages[ItemState.FREE] = len(self._free_pages)
        pages[ItemState.CACHED] = self._n_cached
        pages[ItemState.SHARED] = len(self._readers) - self._n_cached
        for grant in self._grants.values():
            slots[grant.state] += 1
            pages[grant.state] += len(grant.own)
        return {"slots": slots, "pages": pages}

    def _grant(self, owner: Hashable) -> _Grant:
        if owner not in self._grants:
            raise AllocatorError(f"{owner} holds no slot or page")
        return self._grants[owner]

    def _move(self, owner: Hashable, before: ItemState, after: ItemState) -> None:
        grant = self._grant(owner)
        if grant.state is not before:
            raise AllocatorError(f"{owner} is {grant.state}, expected {before}")
        grant.state = after
