"""What is kept of requests that are over: complete pages under content keys, and snapshots at their boundaries.

A page's key is a chained hash: of the key of the page before it and of its own token ids. The first one's parent is the
root, in which everything is that decides about the bytes: model, tokenizer, numerics, row formats, and the tenant's
salt. A hash alone is no proof, so the ids are stored and compared, all the way from the root.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from server.cache.allocator import Allocator
from server.cache.owners import Owner, OwnerStamps
from server.cache.snapshots import Snapshot, SnapshotPoint

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
    children: set[bytes] = field(default_factory=set)
    snapshot: Snapshot | None = None
    """At its end."""

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
    """What has happened so far; all only grow. Tokens of prompts that were looked up, and of those the ones found."""

    looked_up: int = 0
    found: int = 0
    evicted_pages: int = 0
    evicted_snapshots: int = 0
    damaged: int = 0
    collisions: int = 0


class PromptKeys:
    """The content keys of a prompt's complete pages, of every ``page_size`` tokens, under ``root``."""

    def __init__(self, root: bytes, ids: Sequence[int], page_size: int, key_of: KeyOf = page_key) -> None:
        data = np.asarray(ids, dtype="<i4").tobytes()
        step = 4 * page_size
        self.root = root
        self.n = len(ids)
        self.ids = [data[start : start + step] for start in range(0, len(data) // step * step, step)]
        """Of each page, as little-endian int32."""
        self.keys = list(itertools.accumulate(self.ids, key_of, initial=root))[1:]

    def __len__(self) -> int:
        return len(self.ids)

    def common_pages(self, other: PromptKeys) -> int:
        """How many pages both begin with."""
        if self.root != other.root:
            return 0
        pairs = zip(self.ids, other.ids, strict=False)
        return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(self), len(other)))


class PrefixCache:
    """The cached pages of one allocator, and snapshots of at most ``snapshot_nbytes``. Lives where the allocator does.

    At most ``max_pages`` pages are kept that nobody reads (None: all that are free). The least recently used go first,
    the last ones of their prompts before those that lead to them.
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
        self._clock = itertools.count(1)
        self.counts = PrefixCounts()
        self.held_nbytes = 0
        """Of all snapshots."""
        allocator.evict = self._evict

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def snapshots(self) -> Iterator[Snapshot]:
        return (page.snapshot for page in self._pages.values() if page.snapshot is not None)

    def keys_of(self, ids: Sequence[int], salt: str = "") -> PromptKeys:
        """Costs a hash of the whole prompt, about a microsecond a page."""
        return PromptKeys(root_key(self._identity, salt), ids, self._page_size, self._key_of)

    # --- finding ------------------------------------------------------------------------------------------------------

    def match(self, keys: PromptKeys) -> tuple[CachedPage, ...]:
        """The longest chain of cached pages that the prompt begins with. They count as used now."""
        found: list[CachedPage] = []
        parent: CachedPage | None = None
        for key, ids in zip(keys.keys, keys.ids, strict=True):
            page = self._pages.get(key)
            if page is None:
                break
            if page.ids != ids or page.parent is not parent or page.root != keys.root:
                self.counts.collisions += 1
                log.warning("prefix cache: two pages have the key %s", key.hex())
                break
            found.append(page)
            parent = page
        now = next(self._clock)
        for page in found:
            page.used = now
        return tuple(found)

    def hit(self, keys: PromptKeys) -> PrefixHit | None:
        """The longest cached prefix with a snapshot that leaves at least one token to compute."""
        chain = self.match(keys)
        self.counts.looked_up += keys.n
        for n_pages in range(len(chain), 0, -1):
            last = chain[n_pages - 1]
            n = n_pages * self._page_size
            if last.snapshot is not None and n < keys.n:
                self.counts.found += n
                return PrefixHit(chain[:n_pages], last.snapshot, SnapshotPoint(n, last.key))
        return None

    # --- keeping ------------------------------------------------------------------------------------------------------

    def keep_page(self, holder: Hashable, owner: Owner, keys: PromptKeys, index: int, digest: bytes) -> bool:
        """Takes the complete page ``index`` of ``holder``'s grant, whose bytes have ``digest``; ``holder`` reads on.

        False if it is not taken: there is one of that content already, or none before it.
        """
        parent = None
        if index:
            parent = self._pages.get(keys.keys[index - 1])
            if parent is None or parent.ids != keys.ids[index - 1] or parent.root != keys.root:
                return False
        key = keys.keys[index]
        if key in self._pages:
            self.counts.collisions += self._pages[key].ids != keys.ids[index]
            return False
        used = next(self._clock) if parent is None else parent.used
        page = self._allocator.give_to_cache(holder, index)
        self._owners.share(page, owner)
        cached = CachedPage(index, key, keys.ids[index], parent, keys.root, page, digest, used)
        self._pages[key] = self._by_id[page] = cached
        if parent is not None:
            parent.children.add(key)
        return True

    def keep_snapshot(self, snapshot: Snapshot) -> bool:
        """Takes a snapshot of a prefix whose pages are here. False: they are not, or it is too large."""
        page = self._pages.get(snapshot.key)
        if page is None or page.snapshot is not None or snapshot.nbytes > self._snapshot_nbytes:
            return False
        with_one = sorted((p for p in self._pages.values() if p.snapshot is not None), key=lambda p: p.used)
        for oldest in with_one:
            if self.held_nbytes + snapshot.nbytes <= self._snapshot_nbytes:
                break
            self._drop_snapshot(oldest)
            self.counts.evicted_snapshots += 1
        page.snapshot = snapshot
        self.held_nbytes += snapshot.nbytes
        return True

    def trim(self) -> None:
        """Evicts what is over ``max_pages``. To be called when requests have ended."""
        if self._max_pages is not None:
            n_cached = sum(not self._allocator.n_readers(page) for page in self._by_id)
            if n_cached > self._max_pages:
                self._evict(n_cached - self._max_pages)

    # --- giving up ----------------------------------------------------------------------------------------------------

    def drop(self, page: CachedPage) -> None:
        """Forgets a damaged page and all that follow it. Who reads them goes on."""
        self.counts.damaged += 1
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
        return n_pages

    def page_of(self, page: int) -> CachedPage | None:
        """What is cached in the page with this id."""
        return self._by_id.get(page)

    def _evict(self, n_pages: int) -> None:
        """Frees ``n_pages`` that nobody reads, those first that no other follows. Where that is not enough, somebody
        reads what follows: it is forgotten, and stays until it was read.
        """
        unread = [page for page in self._by_id.values() if not self._allocator.n_readers(page.page)]
        unread.sort(key=lambda page: (page.used, -page.index))  # no page was used later than the one before it
        for with_followers in (False, True):
            for page in unread:
                if n_pages <= 0:
                    return
                if self._pages.get(page.key) is page and (with_followers or not page.children):
                    n_freed = self._drop_tree(page)
                    self.counts.evicted_pages += n_freed
                    n_pages -= n_freed

    def _drop_tree(self, page: CachedPage) -> int:
        """Forgets a page and all that follow it; how many are free now."""
        if page.parent is not None:
            page.parent.children.discard(page.key)
        n_freed, left = 0, [page]
        while left:
            dropped = left.pop()
            left += (self._pages[key] for key in dropped.children)
            self._drop_snapshot(dropped)
            del self._pages[dropped.key], self._by_id[dropped.page]
            n_freed += not self._allocator.n_readers(dropped.page)
            self._owners.unshare(dropped.page)
            self._allocator.discard(dropped.page)
        return n_freed

    def _drop_snapshot(self, page: CachedPage) -> None:
        if page.snapshot is not None:
            self.held_nbytes -= page.snapshot.nbytes
            page.snapshot = None
