"""What ``--fault`` does at each of a node's hooks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from server.cache.arena import Arena
from server.cache.layout import Placement, Run
from server.cache.prefix import CachedPage, PrefixCache, PrefixHit, page_key
from server.faults.hooks import Hooks, Put, Sending
from server.faults.messages import MessageFaults
from server.faults.pool import PoolFaults
from server.faults.prefix import PrefixFaults
from server.faults.rows import RowFaults
from server.faults.spec import STATE, WRITES, Fault, FaultKind, FaultSet, Place, skipped_checks
from server.faults.writes import FaultyEngine, Rule, WriteFaults
from server.transfer.checks import Check
from server.transfer.engines.base import TransferEngine
from server.transfer.protocol import AnyMessage

log = logging.getLogger(__name__)


@dataclass
class _Room:
    """A room on the prefill node, and the task that damages it before its tail goes."""

    faults: tuple[Fault, ...]
    n: int
    placement: Placement
    task: asyncio.Task[None] | None = None


class Faults(Hooks):
    """The faults of one node. Lives in its event loop."""

    def __init__(self, faults: FaultSet, arena: Arena) -> None:
        self._faults = faults
        self._arena = arena
        self._messages = MessageFaults(faults)
        self._rows = RowFaults(arena)
        self._pool = PoolFaults(arena)
        self._prefix = PrefixFaults(arena)
        self._last_hit: tuple[Hashable, PrefixHit, PrefixHit] | None = None
        """The last room for which something was cached: what that was, and what was taken."""
        self._writes = WriteFaults()
        self._rooms: dict[Hashable, _Room] = {}
        self._received: set[asyncio.Task[None]] = set()

    def describe(self) -> list[str]:
        return self._faults.describe()

    def entered(self, phase: str) -> None:
        if phase == "queued":
            self._prefix.reserved()
        self._faults.entered(phase)

    def post(self, message: AnyMessage, frame: bytes, put: Put) -> None:
        self._messages.post(message, frame, put)

    def transport(self, make_engine: Callable[[], TransferEngine]) -> Callable[[], TransferEngine]:
        return lambda: FaultyEngine(make_engine(), self._writes)

    def sending(self, key: Hashable, n: int, placement: Placement) -> Sending:
        faults = self._faults.of_room(str(key))
        self._rooms[key] = _Room(faults, n, placement)
        runs = self._arena.layout.live_runs(n, placement)
        for fault in faults:
            if fault.kind in WRITES:
                names = [fault.target] if fault.target else list(runs)
                self._arm(key, fault, [(run, b"") for name in names for run in runs[name]])
        return Sending(
            self._pool.source(key, [fault for fault in faults if fault.place is Place.POOL], placement),
            unsent=_components(faults, FaultKind.DROP, FaultKind.FORGET),
            unclaimed=_components(faults, FaultKind.FORGET),
            miscounted=_components(faults, FaultKind.MISCOUNT),
            skipped=skipped_checks(faults),
            holds_pages=any(fault.kind in STATE for fault in faults),
        )

    def before_tail(self, key: Hashable, push: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """The tail goes after the damage to it, which may wait for another room."""
        room = self._rooms[key]
        room.task = asyncio.create_task(self._damage(key, room, push, is_wanted))

    async def _damage(
        self, key: Hashable, room: _Room, push: Callable[[], None], is_wanted: Callable[[], bool]
    ) -> None:
        try:
            await self._pool.wait_for_partner(key)
            unsent = (FaultKind.DROP, Place.PLAN)
            faults = [f for f in room.faults if f.place in (Place.PLAN, Place.WIRE) and (f.kind, f.place) != unsent]
            damages = await self._rows.make(faults, room.n, room.placement)
            if not is_wanted():
                return  # the memory may be scrubbed already
            for damage in damages:
                if damage.fault.place is Place.WIRE:
                    self._arm(key, damage.fault, damage.parts)
                else:
                    damage.apply(self._arena)
        except Exception:
            log.exception("FAULT INJECTION: %s could not be damaged", key)
        push()

    def _arm(self, key: Hashable, fault: Fault, parts: Iterable[tuple[Run, bytes]]) -> None:
        rules = (Rule(fault.kind, self._arena.ptr + run.offset, run.nbytes, data, fault.seconds) for run, data in parts)
        self._writes.arm(key, tuple(rules))

    def page_key(self, parent: bytes, ids: bytes) -> bytes:
        return page_key(parent, b"" if self._faults.keys_collide else ids)

    def cache_hit(self, key: Hashable, hit: PrefixHit) -> PrefixHit | None:
        if self._faults.misplace_rooms:
            return None  # it will not be computed where the pages are
        if self._last_hit is not None and self._last_hit[0] == key and self._last_hit[1].pages == hit.pages:
            return self._last_hit[2]  # it waits for memory
        taken = self._prefix.take_over(self._faults.of_cached(str(key)), hit)
        self._last_hit = key, hit, taken
        return taken

    def offering(self, key: Hashable, pages: Sequence[CachedPage], cache: PrefixCache) -> None:
        self._prefix.offer(self._faults.of_cached(str(key)), pages, cache)

    def memory_free(self, key: Hashable) -> None:
        room = self._rooms.pop(key, None)
        if room is not None and room.task is not None:
            room.task.cancel()  # it may wait for a second room
        self._writes.disarm(key)
        self._pool.memory_free(key)

    def received(self, key: Hashable, n: int, placement: Placement, check: Callable[[frozenset[Check]], None]) -> None:
        """The checks come after the damage, which may wait for another room."""
        task = asyncio.create_task(self._damage_received(key, n, placement, check))
        self._received.add(task)
        task.add_done_callback(self._received.discard)

    async def _damage_received(
        self, key: Hashable, n: int, placement: Placement, check: Callable[[frozenset[Check]], None]
    ) -> None:
        faults = self._faults.of_room(str(key))
        try:
            for damage in await self._rows.make([f for f in faults if f.place is Place.MEMORY], n, placement):
                damage.apply(self._arena)
        except Exception:
            log.exception("FAULT INJECTION: %s could not be damaged", key)
        check(skipped_checks(faults))


def _components(faults: Iterable[Fault], *kinds: FaultKind) -> frozenset[str]:
    """Those that faults of these ``kinds`` change in the prefill node's plan and claims."""
    return frozenset(f.target for f in faults if f.kind in kinds and f.place in (None, Place.PLAN))


def hooks_of(faults: FaultSet, arena: Arena) -> Hooks:
    """The hooks of a node with these ``faults``, if there are any."""
    return Faults(faults, arena) if faults.is_on else Hooks()
