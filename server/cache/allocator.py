"""Who owns which slot and page. One thread owns an allocator; there are no locks."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from server.cache.layout import Placement
from server.cache.specs import CacheGeometry


class AllocatorError(RuntimeError):
    """A step that a slot's or page's life does not have: a double free, a commit of nothing, a second grant."""


class ItemState(enum.StrEnum):
    """free -> reserved -> committed -> free; quarantined while somebody may still be writing."""

    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


@dataclass
class _Grant:
    placement: Placement
    state: ItemState


class Allocator:
    """Slots and pages of one process, granted together: one slot and the pages for a number of tokens, all or nothing.

    ``permute_seed`` shuffles the order in which ids are handed out (tests: nothing may depend on ids); None hands out
    ascending ids, so that a request's pages are neighbours whenever they can be.
    """

    def __init__(self, geometry: CacheGeometry, *, permute_seed: int | None = None) -> None:
        self._page_size = geometry.page_size
        self._n_pages = geometry.pages - 1
        slots, pages = list(range(1, geometry.slots)), list(range(1, geometry.pages))
        if permute_seed is not None:
            rng = random.Random(permute_seed)
            rng.shuffle(slots)
            rng.shuffle(pages)
        self._keep_sorted = permute_seed is None
        self._free_slots, self._free_pages = deque(slots), deque(pages)
        self._grants: dict[Hashable, _Grant] = {}

    @property
    def capacity_tokens(self) -> int:
        """The longest request, in tokens, that an empty allocator could hold."""
        return self._n_pages * self._page_size

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._page_size)

    @property
    def is_full(self) -> bool:
        """Whether nothing can be granted now, however little it is."""
        return not self._free_slots or not self._free_pages

    def reserve(self, owner: Hashable, n_tokens: int) -> Placement | None:
        """Grants one slot and the pages of ``n_tokens``; None if they are not free now.

        Raises :class:`AllocatorError` if ``owner`` holds a grant already.
        """
        if owner in self._grants:
            raise AllocatorError(f"{owner} already holds {self._grants[owner].placement}")
        n_pages = self.pages_for(n_tokens)
        if not self._free_slots or n_pages > len(self._free_pages):
            return None
        pages = tuple(self._free_pages.popleft() for _ in range(n_pages))
        placement = Placement(self._free_slots.popleft(), pages)
        self._grants[owner] = _Grant(placement, ItemState.RESERVED)
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
        """Back to free, from any other state: nobody writes or reads there any more, and the caller knows it."""
        placement = self._grant(owner).placement
        del self._grants[owner]
        self._free_slots.append(placement.slot)
        self._free_pages.extend(placement.pages)
        if self._keep_sorted:
            self._free_slots = deque(sorted(self._free_slots))
            self._free_pages = deque(sorted(self._free_pages))

    def grants(self) -> list[tuple[Placement, ItemState]]:
        """What is not free."""
        return [(grant.placement, grant.state) for grant in self._grants.values()]

    def counts(self) -> dict[str, dict[str, int]]:
        """``{"slots": {state: n}, "pages": {state: n}}`` over all four states; item 0 is not counted."""
        slots = {state.value: 0 for state in ItemState}
        pages = dict(slots)
        slots[ItemState.FREE] = len(self._free_slots)
        pages[ItemState.FREE] = len(self._free_pages)
        for grant in self._grants.values():
            slots[grant.state] += 1
            pages[grant.state] += len(grant.placement.pages)
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
