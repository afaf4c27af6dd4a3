"""What is kept of requests that are over: complete pages under content keys, and snapshots at their boundaries.

A page's key is a chained hash: of the key of the page before it and of its own token ids. The first one's parent is the
root, in which everything is that decides about the bytes: model, tokenizer, numerics, row formats, and the tenant's
salt. A hash alone is no proof, so the ids are stored and compared, all the way from the root.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from server.cache.allocator import Allocator
from server.cache.owners import Owner, OwnerStamps
from server.cache.snapshots import Snapshot, SnapshotPoint
from server.cache.specs import Scope

log = logging.getLogger(__name__)

KEY_NBYTES = 16
KeyOf = Callable[[bytes, bytes], bytes]
"""The key of a page from its parent's key and its token ids as little-endian int32."""


def page_key(parent: bytes, ids: bytes) -> bytes:
    """xxh3_128 over the parent's key and the page's token ids: 16 bytes."""
    digest = xxhash.xxh3_128(parent)
    digest.update(ids)
    return digest.digest()


def root_key(identity: Iterable[str], salt: str = "") -> bytes:
    """The parent of first pages: BLAKE2b over everything that decides about their bytes, and the tenant's salt, which
    is compared by this hash alone. 16 bytes.
    """
    digest = hashlib.blake2b(digest_size=KEY_NBYTES)
    for part in (*identity, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


@dataclass(eq=False)
class CachedPage:
    """A page of the cache: number ``index`` of every prompt that begins as it says. ``digest`` is its bytes' when it
    was complete (:func:`server.cache.digest.page_digest`).
    """

    index: int
    key: bytes
    ids: bytes
    parent: CachedPage | None
    root: bytes
    page: int
    digest: bytes
    used: int
    """When it was last found, or its last reader left."""
    children: set[bytes] = field(default_factory=set)
    snapshot: Snapshot | None = None
    """At its end."""
    is_listed: bool = False
    """Among the cache's leaves."""

    @property
    def path(self) -> tuple[CachedPage, ...]:
        """From the first page to this one."""
        found: list[CachedPage] = []
        page: CachedPage | None = self
        while page is not None:
            found.append(page)
            page = page.parent
        return tuple(reversed(found))


@dataclass(frozen=True)
class PrefixHit:
    """The part of a prompt that need not be computed: ``pages`` of it, with the ``snapshot`` at their end."""

    pages: tuple[CachedPage, ...]
    snapshot: Snapshot
    point: SnapshotPoint

    @property
    def n(self) -> int:
        """Tokens."""
        return self.point.n


@dataclass
class PrefixCounts:
    """What has happened so far; all only grow. Tokens of prompts that were looked up, and of those the ones found: each
    prompt counts once, however often it is looked up, by the most that was found. What is evicted had to make room.
    """

    looked_up: int = 0
    found: int = 0
    evicted_pages: int = 0
    evicted_snapshots: int = 0
    damaged: int = 0
    collisions: int = 0


class PromptKeys:
    """The content keys of a prompt's complete pages, of every ``page_size`` tokens, under ``root``.

    The prompt is packed (little-endian int32) or a sequence of ids.
    """

    def __init__(self, root: bytes, ids: bytes | Sequence[int], page_size: int, key_of: KeyOf = page_key) -> None:
        data = ids if isinstance(ids, bytes) else np.asarray(ids, dtype="<i4").tobytes()
        step = 4 * page_size
        self.root = root
        self.n = len(data) // 4
        self.ids = [data[start : start + step] for start in range(0, len(data) // step * step, step)]
        """Of each page, as little-endian int32."""
        self.keys = list(itertools.accumulate(self.ids, key_of, initial=root))[1:]
        self.chain: list[CachedPage] = []
        """The cached pages that the prompt begins with, as far as they were compared: :class:`PrefixCache` keeps it."""
        self.n_found = -1
        """The most tokens that a look-up found; -1: it was not looked up."""

    def __len__(self) -> int:
        return len(self.ids)

    def common_pages(self, other: PromptKeys) -> int:
        """How many pages both begin with, by their keys alone: it is no proof that they are the same."""
        pages = range(min(len(self), len(other)))
        return bisect.bisect_left(pages, True, key=lambda index: self.keys[index] != other.keys[index])


class PrefixCache:
    """The cached pages of one allocator, and snapshots of at most ``snapshot_nbytes``. Lives where the allocator does.

    At most ``max_pages`` pages are kept that nobody reads (None: all that are free). Pages that no other follows and
    nobody reads are evicted, the least recently used first; so prompts lose their ends before what they share. Of the
    snapshots the one goes that was not taken or found for the longest time.
    """

    def __init__(
        self,
        allocator: Allocator,
        owners: OwnerStamps,
        identity: Iterable[str],
        page_size: int,
        *,
        snapshot_nbytes: int = 0,
        max_pages: int | None = None,
        key_of: KeyOf = page_key,
    ) -> None:
        self._allocator, self._owners = allocator, owners
        self._identity, self._page_size, self._key_of = tuple(identity), page_size, key_of
        self._snapshot_nbytes, self._max_pages = snapshot_nbytes, max_pages
        self._pages: dict[bytes, CachedPage] = {}
        self._by_id: dict[int, CachedPage] = {}
        self._with_snapshot: dict[bytes, CachedPage] = {}
        """By key; the one that was taken or found last is the last."""
        self._leaves: list[tuple[int, int, CachedPage]] = []
        """A heap by use (then by number, for order) of all pages without readers and followers. Some are used again,
        or forgotten: that is found out when their turn comes.
        """
        self._clock = itertools.count(1)
        self._numbers = itertools.count()
        self.counts = PrefixCounts()
        self.held_nbytes = 0
        """Of all snapshots."""
        allocator.evict = self._evict
        allocator.on_unread = self._unread

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def snapshots(self) -> Iterator[Snapshot]:
        return (page.snapshot for page in self._with_snapshot.values() if page.snapshot is not None)

    @property
    def n_snapshots(self) -> int:
        return len(self._with_snapshot)

    @property
    def snapshot_nbytes(self) -> int:
        """Most bytes of snapshots."""
        return self._snapshot_nbytes

    @property
    def max_pages(self) -> int | None:
        """Most pages that nobody reads; None: all that are free."""
        return self._max_pages

    def keys_of(self, ids: bytes | Sequence[int], salt: str = "") -> PromptKeys:
        """Of a prompt, packed (little-endian int32) or as ids. Costs a hash of the whole prompt, about a microsecond a
        page; of ids that are not packed ten.
        """
        return PromptKeys(root_key(self._identity, salt), ids, self._page_size, self._key_of)

    # --- finding ------------------------------------------------------------------------------------------------------

    def match(self, keys: PromptKeys) -> tuple[CachedPage, ...]:
        """The longest chain of cached pages that the prompt begins with. They count as used now."""
        self._follow(keys, len(keys))
        now = next(self._clock)
        for page in keys.chain:
            page.used = now
        return tuple(keys.chain)

    def hit(self, keys: PromptKeys) -> PrefixHit | None:
        """The longest cached prefix with a snapshot that leaves at least one token to compute."""
        chain = self.match(keys)
        with_snapshot = (page for page in reversed(chain) if page.snapshot is not None)
        last = next((page for page in with_snapshot if self._end_of(page) < keys.n), None)
        n = 0 if last is None else self._end_of(last)
        self.counts.looked_up += keys.n if keys.n_found < 0 else 0
        self.counts.found += max(0, n - max(0, keys.n_found))
        keys.n_found = max(keys.n_found, n)
        if last is None or last.snapshot is None:
            return None
        self._with_snapshot[last.key] = self._with_snapshot.pop(last.key)
        return PrefixHit(chain[: last.index + 1], last.snapshot, SnapshotPoint(n, last.key))

    def _end_of(self, page: CachedPage) -> int:
        return (page.index + 1) * self._page_size

    def _follow(self, keys: PromptKeys, n_pages: int) -> CachedPage | None:
        """Makes ``keys.chain`` what it is now, for the first ``n_pages`` or more; page ``n_pages - 1`` if it is there.

        A page is the prompt's if its ids are and if the page before it is, whatever its key.
        """
        chain = keys.chain
        while chain and not self._is_here(chain[-1]):
            chain.pop()
        while len(chain) < n_pages:
            index, parent = len(chain), chain[-1] if chain else None
            page = self._pages.get(keys.keys[index])
            if page is None:
                return None
            if page.ids != keys.ids[index] or page.parent is not parent or page.root != keys.root:
                self.counts.collisions += 1
                log.warning("prefix cache: two pages have the key %s", page.key.hex())
                return None
            chain.append(page)
        return chain[n_pages - 1] if n_pages else None

    def _is_here(self, page: CachedPage) -> bool:
        """Then so are all before it: a page is forgotten with all that follow it."""
        return self._pages.get(page.key) is page

    # --- keeping ------------------------------------------------------------------------------------------------------

    def keep_page(self, holder: Hashable, owner: Owner, keys: PromptKeys, index: int, digest: bytes) -> bool:
        """Takes the complete page ``index`` of ``holder``'s grant, whose bytes have ``digest``; ``holder`` reads on.

        False if it is not taken: there is one of that content already, or none before it, another page has its key, or
        it is not ``owner``'s own.
        """
        parent = self._follow(keys, index)
        if index and parent is None:
            return False
        if self._follow(keys, index + 1) is not None or keys.keys[index] in self._pages:
            return False
        page = self._allocator.placement_of(holder).pages[index]
        if self._owners.owner_of(Scope.PAGE, page) != owner:
            return False
        self._allocator.give_to_cache(holder, index)
        self._owners.share(page, owner)
        key = keys.keys[index]
        cached = CachedPage(index, key, keys.ids[index], parent, keys.root, page, digest, next(self._clock))
        self._pages[key] = self._by_id[page] = cached
        keys.chain.append(cached)
        if parent is not None:
            parent.children.add(key)
        return True

    def keep_snapshot(self, snapshot: Snapshot, keys: PromptKeys) -> bool:
        """Takes a snapshot of a prefix of ``keys`` whose pages are here. False: they are not, or it is too large."""
        page = self._follow(keys, min(snapshot.n // self._page_size, len(keys)))
        if page is None or page.key != snapshot.key or self._end_of(page) != snapshot.n:
            return False
        if page.snapshot is not None or snapshot.nbytes > self._snapshot_nbytes:
            return False
        while self.held_nbytes + snapshot.nbytes > self._snapshot_nbytes:
            self._drop_snapshot(next(iter(self._with_snapshot.values())))
            self.counts.evicted_snapshots += 1
        page.snapshot = snapshot
        self._with_snapshot[page.key] = page
        self.held_nbytes += snapshot.nbytes
        return True

    def trim(self) -> None:
        """Evicts what is over ``max_pages``. Happens by itself whenever pages lose their last reader."""
        if self._max_pages is not None:
            self._evict(self._allocator.n_cached - self._max_pages)

    # --- giving up ----------------------------------------------------------------------------------------------------

    def drop(self, page: CachedPage) -> None:
        """Forgets a damaged page and all that follow it. Who reads them goes on."""
        self.counts.damaged += 1
        if self._is_here(page):
            self._drop_tree(page)

    def drop_snapshot(self, page: CachedPage) -> None:
        """Forgets a damaged snapshot."""
        self.counts.damaged += 1
        self._drop_snapshot(page)

    def flush(self) -> int:
        """Forgets everything; how many pages it was."""
        n_pages = len(self._pages)
        for page in [page for page in self._pages.values() if page.parent is None]:
            self._drop_tree(page)
        self._leaves.clear()
        return n_pages

    def page_of(self, page: int) -> CachedPage | None:
        """What is cached in the page with this id."""
        return self._by_id.get(page)

    def _unread(self, pages: Sequence[int]) -> None:
        """The last readers of ``pages`` have left. Some may be given up already."""
        now = next(self._clock)
        for number in pages:
            if (page := self._by_id.get(number)) is None:
                self._owners.unshare(number)
                continue
            page.used = now
            self._list_if_leaf(page)
        self.trim()

    def _list_if_leaf(self, page: CachedPage) -> None:
        if not (page.is_listed or page.children or self._allocator.n_readers(page.page)):
            page.is_listed = True
            heapq.heappush(self._leaves, (page.used, next(self._numbers), page))

    def _evict(self, n_pages: int) -> None:
        """Frees ``n_pages`` that nobody reads. Where leaves are not enough, somebody reads what follows a page that
        nobody reads (the same content lies elsewhere too): it is forgotten, and stays until it was read.
        """
        target = self._allocator.n_cached - n_pages
        while self._allocator.n_cached > target and self._leaves:
            used, _, page = heapq.heappop(self._leaves)
            page.is_listed = False
            if page.used != used:
                if self._is_here(page):
                    self._list_if_leaf(page)
            elif self._is_here(page) and not page.children and not self._allocator.n_readers(page.page):
                self._evict_tree(page)
        if self._allocator.n_cached > target:
            unread = [page for page in self._by_id.values() if not self._allocator.n_readers(page.page)]
            for page in sorted(unread, key=lambda page: page.used):
                if self._allocator.n_cached <= target:
                    return
                if self._is_here(page):
                    self._evict_tree(page)

    def _evict_tree(self, page: CachedPage) -> None:
        n_pages, n_snapshots = len(self._pages), len(self._with_snapshot)
        self._drop_tree(page)
        self.counts.evicted_pages += n_pages - len(self._pages)
        self.counts.evicted_snapshots += n_snapshots - len(self._with_snapshot)

    def _drop_tree(self, page: CachedPage) -> None:
        """Forgets a page and all that follow it."""
        left = [page]
        while left:
            dropped = left.pop()
            left += (self._pages[key] for key in dropped.children)
            self._drop_snapshot(dropped)
            del self._pages[dropped.key], self._by_id[dropped.page]
            if not self._allocator.n_readers(dropped.page):
                self._owners.unshare(dropped.page)
            self._allocator.discard(dropped.page)
        if page.parent is not None:
            page.parent.children.discard(page.key)
            self._list_if_leaf(page.parent)

    def _drop_snapshot(self, page: CachedPage) -> None:
        if page.snapshot is not None:
            del self._with_snapshot[page.key]
            self.held_nbytes -= page.snapshot.nbytes
            page.snapshot = None
