"""What the cache has to do with one prompt: where snapshots are taken, and for which room it waits. Pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from server.cache.prefix import CachedPage, PrefixHit, PromptKeys
from server.cache.snapshots import SnapshotPoint


@dataclass(eq=False)
class PromptPrefix:
    """The beginning of a room's prompt. ``keys`` are its content keys; nothing is taken over from the cache unless it
    ``may_hit``.

    While the prompt is computed: ``hit`` is what was taken over, ``pending`` are the snapshots that are still to come,
    and of the first ``n_complete`` pages the digests are known. ``awaited`` is what it waits for in the queue.
    """

    keys: PromptKeys
    may_hit: bool
    hit: PrefixHit | None = None
    pending: list[SnapshotPoint] = field(default_factory=list)
    n_complete: int = 0
    awaited: Awaited | None = None

    @property
    def n_reused(self) -> int:
        """Tokens that need not be computed."""
        return 0 if self.hit is None else self.hit.n

    def begin(self, hit: PrefixHit | None, points: Iterable[SnapshotPoint]) -> None:
        """The prompt is computed now, on from ``hit``, with snapshots at ``points``."""
        self.hit, self.pending, self.n_complete, self.awaited = hit, list(points), 0, None

    def ended(self) -> None:
        """Nothing more will come of it."""
        self.pending.clear()


class Awaited(NamedTuple):
    """The snapshot at ``point``, which another prompt is about to reach."""

    prefix: PromptPrefix
    point: SnapshotPoint

    @property
    def is_coming(self) -> bool:
        return self.point in self.prefix.pending


def snapshot_points(
    keys: PromptKeys, page_size: int, n_hit: int, chain: Sequence[CachedPage], others: Iterable[PromptKeys], every: int
) -> tuple[SnapshotPoint, ...]:
    """The page boundaries at which a prompt gets snapshots that is computed from token ``n_hit`` on.

    At its last full page; where the same prompt would go on; where the ``chain`` of cached pages ends (a branch seen a
    second time); where it parts from ``others`` that are under way; and each ``every`` pages (0: not there). Where the
    cache has one already there is none.
    """
    wanted = {keys.n // page_size, (keys.n - 1) // page_size, len(chain)}
    wanted.update(keys.common_pages(other) for other in others)
    if every:
        wanted.update(range(every, len(keys) + 1, every))
    have = {i for i, page in enumerate(chain, start=1) if page.snapshot is not None}
    n_pages_hit = n_hit // page_size
    return tuple(SnapshotPoint(n * page_size, keys.keys[n - 1]) for n in sorted(wanted - have) if n > n_pages_hit)


def to_wait_for(keys: PromptKeys, page_size: int, n_hit: int, computed: Iterable[PromptPrefix]) -> Awaited | None:
    """The first snapshot to come of the prompts that are ``computed`` now which saves a prompt more than the ``n_hit``
    tokens that it would find already; None: it has nothing to wait for.
    """
    found: Awaited | None = None
    for prefix in computed:
        if not prefix.pending:
            continue
        n_common = min(keys.common_pages(prefix.keys) * page_size, keys.n - 1)
        for point in prefix.pending:
            if n_hit < point.n <= n_common and (found is None or point.n < found.point.n):
                found = Awaited(prefix, point)
    return found
