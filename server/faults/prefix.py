"""Faults of the prefix cache: what a prompt is computed on from, and what is offered, is not what was kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from server.cache.arena import POISON_BYTE, Arena
from server.cache.capacity import slot_names
from server.cache.digest import StateDigests
from server.cache.layout import Placement, Run
from server.cache.live import live_positions
from server.cache.prefix import CachedPage, PrefixCache, PrefixHit
from server.cache.snapshots import Snapshot
from server.cache.specs import Scope
from server.faults.spec import Fault, FaultKind

log = logging.getLogger(__name__)

_BIT = 0x01
"""Of a row's last byte: a low bit of the exponent in every format that rows have, so that numbers stay finite."""


@dataclass
class _Eviction:
    """Offered pages that are to be forgotten when their room is reserved on the prefill node."""

    pages: Sequence[CachedPage]
    cache: PrefixCache


class PrefixFaults:
    """Damages what one node has cached. Remembers the snapshot of the hit before."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._before: Snapshot | None = None
        self._evictions: list[_Eviction] = []

    def take_over(self, faults: Iterable[Fault], hit: PrefixHit) -> PrefixHit:
        """What is taken for ``hit``."""
        before, self._before = self._before, hit.snapshot
        for fault in faults:
            match fault.kind:
                case FaultKind.FLIP_PAGE:
                    self._flip(hit.pages[0], fault.target)
                case FaultKind.FLIP_SNAPSHOT:
                    hit = replace(hit, snapshot=self._flipped(hit.snapshot))
                    hit.pages[-1].snapshot = hit.snapshot
                case FaultKind.SHIFT_SNAPSHOT:
                    others = (page.snapshot for page in hit.pages[:-1] if page.snapshot is not None)
                    hit = _with_snapshot(hit, next(others, None), fault)
                case FaultKind.STALE_SNAPSHOT:
                    is_other = before is not None and before.key != hit.point.key
                    hit = _with_snapshot(hit, before if is_other else None, fault)
        return hit

    def offer(self, faults: Iterable[Fault], pages: Sequence[CachedPage], cache: PrefixCache) -> None:
        """What happens to the offered ``pages`` of ``cache``, now or when their room is reserved."""
        for fault in faults:
            match fault.kind:
                case FaultKind.FLIP_PAGE:
                    self._flip(pages[0], fault.target)
                case FaultKind.VARY_PAGE:
                    self._flip(pages[0], fault.target)
                    pages[0].digest = self._digest(pages[0])
                case FaultKind.OVERWRITE_OFFER:
                    _forget(pages, cache)
                    for run in self._runs(pages[-1]):
                        self._arena.write(run, bytes((POISON_BYTE,)) * run.nbytes)
                case FaultKind.EVICT_OFFER:
                    self._evictions.append(_Eviction(pages, cache))

    def reserved(self) -> None:
        """A room of the decode node is reserved on its prefill node."""
        evictions, self._evictions = self._evictions, []
        for eviction in evictions:
            _forget(eviction.pages, eviction.cache)

    def _flip(self, page: CachedPage, component: str) -> None:
        c = self._arena.layout.component(component)
        run = Run(c.offset + page.page * c.item_stride + c.row_nbytes - 1, 1)
        self._arena.write(run, bytes((self._arena.read([run])[0] ^ _BIT,)))

    def _flipped(self, snapshot: Snapshot) -> Snapshot:
        """In the last row of the first component, in its first layer: the next tokens read it in all layers."""
        layout, data = self._arena.layout, bytearray(snapshot.data)
        c = layout.component(slot_names(layout)[0])
        rows = live_positions(snapshot.n, layout.window, (c.name,))[c.name]
        data[(len(rows) - 1) * c.row_nbytes + c.row_nbytes // len(c.layer_ids) - 1] ^= _BIT
        return replace(snapshot, data=bytes(data))

    def _runs(self, page: CachedPage) -> list[Run]:
        paged = self._arena.layout.page_components
        return [Run(c.offset + page.page * c.item_stride, c.rows * c.row_nbytes) for c in paged]

    def _digest(self, page: CachedPage) -> bytes:
        layout = self._arena.layout
        names = [c.name for c in layout.components if c.scope is Scope.PAGE]
        digests = StateDigests(self._arena, layout.page_size, Placement(0, (page.page,)), names)
        return digests.take_pages(layout.page_size)[0]


def _with_snapshot(hit: PrefixHit, snapshot: Snapshot | None, fault: Fault) -> PrefixHit:
    if snapshot is None:
        log.warning("FAULT INJECTION: %s changes nothing: there is no other snapshot", fault)
        return hit
    return replace(hit, snapshot=snapshot)


def _forget(pages: Sequence[CachedPage], cache: PrefixCache) -> None:
    """With the first page all that follow it."""
    if cache.page_of(pages[0].page) is pages[0]:
        cache.drop(pages[0])
