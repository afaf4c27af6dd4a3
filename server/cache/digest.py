"""Digests over live bytes, in ascending logical position with the layers inside.

Both sides get the same ones, whatever their rings and ids are.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from server.cache.arena import Arena
from server.cache.layout import Placement, Run


def component_digest(arena: Arena, runs: Iterable[Run]) -> int:
    """xxh3_64 over the bytes of ``runs`` in order; of nothing, if there are none."""
    digest = xxhash.xxh3_64()
    for run in runs:
        digest.update(arena.memory(run))
    return digest.intdigest()


def live_digests(arena: Arena, n: int, placement: Placement, names: Iterable[str] | None = None) -> dict[str, int]:
    """One digest per component (all of the arena's, or those in ``names``) over its live bytes after ``n`` prompt
    tokens.
    """
    wanted = None if names is None else set(names)
    return {
        name: component_digest(arena, runs)
        for name, runs in arena.layout.live_runs(n, placement).items()
        if wanted is None or name in wanted
    }
