"""Faults in the prefill node's pool: a room uses a wrong slot or wrong pages, for the digest and the sending alike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from server.cache.arena import Arena
from server.cache.layout import ComponentLayout, Placement
from server.faults import rows
from server.faults.spec import Fault, FaultKind

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Misplaced(Placement):
    """A placement that looks for the rows of some components in the ``wrong`` slot or pages."""

    wrong: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def items(self, component: ComponentLayout) -> tuple[int, ...]:
        return self.wrong.get(component.name) or super().items(component)


@dataclass(frozen=True)
class _First:
    """The first of two rooms: its memory stays until the second, which uses it, is ``over``."""

    key: Hashable
    placement: Placement
    over: asyncio.Event


class PoolFaults:
    """Remembers the room before, and brings two rooms together to swap."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._before: Placement | None = None
        self._firsts: dict[str, _First] = {}
        self._waits_for: dict[Hashable, asyncio.Event] = {}
        self._ends: dict[Hashable, asyncio.Event] = {}

    def source(self, key: Hashable, faults: Sequence[Fault], placement: Placement) -> Placement:
        """Where the rows of a room in ``placement`` are looked for."""
        wrong = {fault.target: self._wrong_items(key, fault, placement) for fault in faults}
        self._before = placement
        return Misplaced(placement.slot, placement.pages, wrong=wrong) if wrong else placement

    async def wait_for_partner(self, key: Hashable) -> None:
        """If a second room uses the memory of this one, until that room is over."""
        if (over := self._waits_for.pop(key, None)) is not None:
            try:
                await asyncio.wait_for(over.wait(), rows.SWAP_WAIT_S)
            except TimeoutError:
                log.warning("FAULT INJECTION: %s: no second room within %g s", key, rows.SWAP_WAIT_S)

    def memory_free(self, key: Hashable) -> None:
        self._waits_for.pop(key, None)
        self._firsts = {name: first for name, first in self._firsts.items() if first.key != key}
        if (over := self._ends.pop(key, None)) is not None:
            over.set()

    def _wrong_items(self, key: Hashable, fault: Fault, placement: Placement) -> tuple[int, ...]:
        """The slot or pages that a room uses instead of its own."""
        component = self._arena.layout.component(fault.target)
        own = placement.items(component)
        match fault.kind:
            case FaultKind.ZERO:
                return (0,) * len(own)
            case FaultKind.SHIFT:
                return tuple(item % (component.items - 1) + 1 for item in own)
            case FaultKind.STALE if self._before is not None and self._before.items(component) != own:
                wrong = self._before.items(component)
            case FaultKind.SWAP:
                wrong = self._partner(key, fault, placement).items(component)
            case _:
                owner_of = self._arena.owners.owner_of
                wrong = tuple(item for item in range(1, component.items) if owner_of(component.scope, item) is None)
        return (wrong + own[len(wrong) :])[: len(own)]

    def _partner(self, key: Hashable, fault: Fault, placement: Placement) -> Placement:
        """The memory of the other of two rooms; the first gets its own, and will wait for the end of the second."""
        first = self._firsts.pop(str(fault), None)
        if first is None:
            over = self._waits_for[key] = asyncio.Event()
            self._firsts[str(fault)] = _First(key, placement, over)
            return placement
        self._ends[key] = first.over
        return first.placement
