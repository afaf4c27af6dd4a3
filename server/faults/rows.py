"""Faults of rows in memory: what a fault makes of a component's live rows, the same on both nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from server.cache.arena import POISON_BYTE, Arena
from server.cache.layout import Placement, Run
from server.faults.spec import Fault, FaultKind

log = logging.getLogger(__name__)

SWAP_WAIT_S = 10.0
"""How long the first of two rooms waits for the second."""


@dataclass(frozen=True)
class Damage:
    """What ``fault`` makes of a room's live rows: every run of its component with its new bytes."""

    fault: Fault
    parts: list[tuple[Run, bytes]]

    def apply(self, arena: Arena) -> None:
        for run, data in self.parts:
            arena.write(run, data)


class RowFaults:
    """Makes damages for one arena. Remembers the rows of the room before, and brings two rooms together to swap."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._before: dict[str, bytes] = {}
        self._waiting: dict[str, tuple[bytes, asyncio.Future[bytes]]] = {}

    async def make(self, faults: Sequence[Fault], n: int, placement: Placement) -> list[Damage]:
        """What ``faults`` do to a room of ``n`` tokens, whose rows are right; nothing is written yet. Waits for a
        partner to ``swap`` with; without one in time that fault does nothing.
        """
        runs = self._arena.layout.live_runs(n, placement)
        rows = {name: self._arena.read(found) for name, found in runs.items()}
        before, self._before = self._before, rows
        found = []
        for fault in faults:
            name = fault.target
            if fault.kind is FaultKind.SWAP:
                wrong = await self._swap(fault, rows[name])
            else:
                wrong = self._wrong(fault, rows[name], before.get(name, b""), runs[name])
            if wrong is None or wrong == rows[name]:
                log.warning("FAULT INJECTION: %s changes nothing", fault)
                continue
            stream = BytesIO(wrong)
            found.append(Damage(fault, [(run, stream.read(run.nbytes)) for run in runs[name]]))
        return found

    def _wrong(self, fault: Fault, right: bytes, before: bytes, runs: list[Run]) -> bytes:
        row_nbytes = self._arena.layout.component(fault.target).row_nbytes
        match fault.kind:
            case FaultKind.ZERO:
                return bytes(len(right))
            case FaultKind.STALE:
                return _fitted(before, right)
            case FaultKind.SHIFT if len(right) == row_nbytes:  # its neighbour in the pool
                return self._arena.read([Run(runs[0].offset - row_nbytes, row_nbytes)])
            case FaultKind.SHIFT:
                return right[-row_nbytes:] + right[:-row_nbytes]
            case _:
                return bytes((POISON_BYTE,)) * len(right)

    async def _swap(self, fault: Fault, right: bytes) -> bytes | None:
        """The rows of the other room that has the same fault."""
        name = str(fault)
        if name in self._waiting:
            other, first = self._waiting.pop(name)
            if not first.done():
                first.set_result(right)
                return _fitted(other, right)
        mine: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[name] = (right, mine)
        try:
            return _fitted(await asyncio.wait_for(mine, SWAP_WAIT_S), right)
        except TimeoutError:
            log.warning("FAULT INJECTION: %s: no second room within %g s", fault, SWAP_WAIT_S)
            if self._waiting.get(name) == (right, mine):
                del self._waiting[name]
            return None


def _fitted(rows: bytes, like: bytes) -> bytes:
    return rows[: len(like)].ljust(len(like), b"\0")
