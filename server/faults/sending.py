"""Fault injection on the prefill node: what ``--fault`` does to rooms on their way through its pool and its transport.

Without a fault every method here is a look at an empty list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from server.cache.arena import Arena
from server.cache.layout import ComponentLayout, Placement
from server.faults.rows import SWAP_WAIT_S, Damage, RowDamage
from server.faults.spec import STATE, WRITES, Fault, FaultKind, FaultSet, Place
from server.faults.writes import Rule, WriteFault, WriteFaults
from server.transfer.engines.base import TransferEngine

log = logging.getLogger(__name__)

_WRITE_FAULTS = {
    FaultKind.DELAY_WRITES: WriteFault.DELAY,
    FaultKind.FAIL_WRITES: WriteFault.REFUSE,
    FaultKind.LATE_WRITES: WriteFault.LATE,
}


@dataclass(frozen=True)
class Misplaced(Placement):
    """A placement that looks for the rows of some components in the ``wrong`` slot or pages."""

    wrong: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def items(self, component: ComponentLayout) -> tuple[int, ...]:
        return self.wrong.get(component.name) or super().items(component)


@dataclass(frozen=True)
class _First:
    """The first of two rooms: its memory stays until the second, which uses it, is over."""

    key: Hashable
    placement: Placement
    over: asyncio.Event


class SendingFaults:
    """All of a prefill node's faults that strike rooms. Lives in the node's event loop."""

    def __init__(self, arena: Arena, faults: FaultSet) -> None:
        self._arena = arena
        self._faults = faults
        self._rows = RowDamage(arena)
        self._writes = WriteFaults()
        self._before: Placement | None = None
        self._firsts: dict[str, _First] = {}
        self._waits_for: dict[Hashable, asyncio.Event] = {}
        self._ends: dict[Hashable, asyncio.Event] = {}

    @property
    def is_on(self) -> bool:
        return self._faults.is_on

    def wrapping(self, make_engine: Callable[[], TransferEngine]) -> Callable[[], TransferEngine]:
        """``make_engine``, with room for faults in its writes if any fault is on."""
        return self._writes.wrapping(make_engine) if self.is_on else make_engine

    def strike(self, key: Hashable) -> tuple[Fault, ...]:
        return self._faults.strike(str(key))

    def entered(self, phase: str) -> None:
        self._faults.entered(phase)

    def start(self, key: Hashable, struck: Iterable[Fault], n: int, placement: Placement) -> Placement:
        """A room begins: arms the faults of its writes, and says where its rows are to be looked for."""
        if not self.is_on:
            return placement
        runs = self._arena.layout.live_runs(n, placement)
        for fault in struck:
            if fault.kind in WRITES:
                names = [fault.component] if fault.component else list(runs)
                write_fault = _WRITE_FAULTS[fault.kind]
                rules = [
                    Rule(write_fault, self._arena.ptr + run.offset, run.nbytes, seconds=fault.seconds)
                    for name in names
                    for run in runs[name]
                ]
                self._writes.arm(key, tuple(rules))
        wrong = {
            fault.component: self._wrong_items(key, fault, placement)
            for fault in struck
            if fault.kind in STATE and fault.place is Place.POOL
        }
        self._before = placement
        return Misplaced(placement.slot, placement.pages, wrong) if wrong else placement

    @staticmethod
    def holds_pages(struck: Iterable[Fault]) -> bool:
        """Whether nothing may be sent before the whole prompt is computed."""
        return any(fault.kind in STATE for fault in struck)

    async def damage(
        self, key: Hashable, struck: Sequence[Fault], n: int, placement: Placement, goes_on: Callable[[], bool]
    ) -> bool:
        """Damages a room whose prompt of ``n`` tokens is computed, before its tail goes; whether it is still to go.

        May wait for a second room; afterwards ``goes_on`` says whether the room does.
        """
        damages = await self._make(key, struck, n, placement)
        if not goes_on():
            return False
        self._apply(key, damages)
        return True

    async def _make(self, key: Hashable, struck: Sequence[Fault], n: int, placement: Placement) -> list[Damage]:
        if (over := self._waits_for.pop(key, None)) is not None:
            try:
                await asyncio.wait_for(over.wait(), SWAP_WAIT_S)
            except TimeoutError:
                log.warning("FAULT INJECTION: %s: no second room within %g s", key, SWAP_WAIT_S)
        faults = [
            fault
            for fault in struck
            if (fault.kind in STATE and fault.place is Place.WIRE)
            or (fault.kind in STATE - {FaultKind.DROP} and fault.place is Place.PLAN)
        ]
        return await self._rows.make(faults, n, placement)

    def _apply(self, key: Hashable, damages: Iterable[Damage]) -> None:
        """Puts damages in their place: into this node's memory, or into the writes that read it."""
        for damage in damages:
            if damage.fault.place is Place.PLAN:
                damage.apply(self._arena)
                continue
            kind = WriteFault.SKIP if damage.fault.kind is FaultKind.DROP else WriteFault.REPLACE
            rules = (Rule(kind, self._arena.ptr + run.offset, run.nbytes, data) for run, data in damage.parts())
            self._writes.arm(key, tuple(rules))

    def ended(self, key: Hashable) -> None:
        """A room is over."""
        self._writes.disarm(key)
        self._waits_for.pop(key, None)
        self._firsts = {name: first for name, first in self._firsts.items() if first.key != key}
        if (over := self._ends.pop(key, None)) is not None:
            over.set()

    def _wrong_items(self, key: Hashable, fault: Fault, placement: Placement) -> tuple[int, ...]:
        """The slot or pages that a room uses instead of its own."""
        component = self._arena.layout.component(fault.component)
        own = placement.items(component)
        match fault.kind:
            case FaultKind.ZERO:
                return (0,) * len(own)
            case FaultKind.SHIFT:
                return tuple(item % (component.items - 1) + 1 for item in own)
            case FaultKind.STALE if self._before is not None and self._before.items(component) != own:
                return _fitted(self._before.items(component), own)
            case FaultKind.SWAP:
                other = self._partner(key, fault, placement)
                return _fitted(other.items(component), own) if other is not None else own
            case _:
                owner_of = self._arena.owners.owner_of
                free = [item for item in range(1, component.items) if owner_of(component.scope, item) is None]
                return _fitted(tuple(free), own)

    def _partner(self, key: Hashable, fault: Fault, placement: Placement) -> Placement | None:
        """The memory of the other of two rooms; None for the first of them, which will wait for the second's end."""
        first = self._firsts.pop(str(fault), None)
        if first is None:
            over = self._waits_for[key] = asyncio.Event()
            self._firsts[str(fault)] = _First(key, placement, over)
            return None
        self._ends[key] = first.over
        return first.placement


def _fitted(items: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """``items``, as many as there are of ``own``, filled up from those."""
    return (items + own[len(items) :])[: len(own)]
