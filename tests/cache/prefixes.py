"""Rooms that keep pages in a cache, without a model: a page's bytes are its digest."""

from __future__ import annotations

from server.cache.allocator import Allocator
from server.cache.layout import ArenaLayout, Placement
from server.cache.owners import Owner, OwnerStamps
from server.cache.prefix import CachedPage, KeyOf, PrefixCache, PromptKeys, page_key
from server.cache.snapshots import Snapshot
from tests.transfer.support import make_geometry

PAGE = 256


class Node:
    """The pools of a node. Prompts are strings here, a letter for each page."""

    def __init__(
        self,
        *,
        pages: int = 8,
        slots: int = 4,
        snapshot_nbytes: int = 0,
        max_pages: int | None = None,
        key_of: KeyOf = page_key,
    ) -> None:
        geometry = make_geometry(pages=pages + 1, slots=slots + 1)
        self.freed: list[int] = []
        self.allocator = Allocator(geometry, on_free=lambda placement: self.freed.extend(placement.pages))
        self.owners = OwnerStamps(ArenaLayout.from_geometry(geometry))
        self.cache = PrefixCache(
            self.allocator,
            self.owners,
            ["model"],
            PAGE,
            snapshot_nbytes=snapshot_nbytes,
            max_pages=max_pages,
            key_of=key_of,
        )
        self._rooms: dict[int, Placement] = {}

    def keys(self, prompt: str, *, more: int = 1, salt: str = "") -> PromptKeys:
        """Of a prompt with ``more`` tokens behind its last full page."""
        return self.cache.keys_of([ord(letter) for letter in prompt for _ in range(PAGE)] + [0] * more, salt)

    def begin(self, room: int, keys: PromptKeys, n_shared: int = 0) -> Placement | None:
        """Takes over ``n_shared`` pages of the cache."""
        shared = [page.page for page in self.cache.match(keys)[:n_shared]]
        placement = self.allocator.reserve(room, keys.n, shared=shared)
        if placement is not None:
            self.owners.stamp(placement, Owner(room, 1))
            self._rooms[room] = placement
        return placement

    def keep(self, room: int, keys: PromptKeys, index: int) -> bool:
        digest = keys.ids[index][:4] + index.to_bytes(4, "little")
        return self.cache.keep_page(room, Owner(room, 1), keys, index, digest)

    def keep_all(self, room: int, keys: PromptKeys) -> None:
        for index in range(len(keys)):
            self.keep(room, keys, index)

    def snapshot(self, keys: PromptKeys, n_pages: int, nbytes: int = 1) -> bool:
        return self.cache.keep_snapshot(Snapshot(n_pages * PAGE, keys.keys[n_pages - 1], bytes(nbytes), 0), keys)

    def end(self, room: int) -> None:
        self.owners.clear(self._rooms.pop(room), Owner(room, 1))
        self.allocator.release(room)

    def place(self, room: int, placement: Placement) -> None:
        """The room has another placement from now on."""
        self._rooms[room] = placement

    def run(self, room: int, prompt: str) -> PromptKeys:
        """A whole life, after which all pages are cached."""
        keys = self.keys(prompt)
        assert self.begin(room, keys, len(self.cache.match(keys))) is not None
        self.keep_all(room, keys)
        self.end(room)
        return keys

    def cached(self) -> dict[str, CachedPage]:
        """By the letters up to them."""
        pages = (self.cache.page_of(page) for page in self.allocator.cached_pages())
        return {"".join(chr(each.ids[0]) for each in page.path): page for page in pages if page is not None}
