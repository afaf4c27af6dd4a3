"""The state of a node's memory as a row of letters, for whoever draws it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from server.cache.allocator import Allocator, ItemState

MAX_CELLS = 4096
_LETTERS = {
    ItemState.FREE: ord("."),
    ItemState.CACHED: ord("K"),
    ItemState.SHARED: ord("S"),
    ItemState.RESERVED: ord("R"),
    ItemState.COMMITTED: ord("C"),
    ItemState.QUARANTINED: ord("Q"),
}
_RANKS = list(_LETTERS.values())
"""Of the items that share a cell the last of these is shown."""


def memory_state(allocator: Allocator) -> dict[str, Any]:
    """``slots`` and ``pages``: how many are in each state, and a letter for each (or for ``per_cell`` of them).

    It takes the time of a look at every slot and page that is not free.
    """
    counts, grants = allocator.counts(), allocator.grants()
    slots = bytearray(b"." * sum(counts["slots"].values()))
    pages = bytearray(b"." * sum(counts["pages"].values()))
    for placement, state in grants:
        letter = _LETTERS[state]
        slots[placement.slot - 1] = letter
        for page in placement.pages:
            pages[page - 1] = letter
    for page, state in allocator.cached_pages().items():
        pages[page - 1] = _LETTERS[state]
    return {"slots": _shown(counts["slots"], slots), "pages": _shown(counts["pages"], pages)}


def _shown(counts: dict[str, int], letters: bytearray) -> dict[str, Any]:
    per_cell = -(-len(letters) // MAX_CELLS) or 1
    cells = letters
    if per_cell > 1:
        cells = bytearray(_worst(letters[i : i + per_cell]) for i in range(0, len(letters), per_cell))
    return {"counts": counts, "per_cell": per_cell, "cells": cells.decode()}


def _worst(letters: Iterable[int]) -> int:
    found = set(letters)
    return next(letter for letter in reversed(_RANKS) if letter in found)
