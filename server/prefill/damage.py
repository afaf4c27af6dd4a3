"""Fault injection on the prefill node: changes a component's rows between its digest and its sending."""

from __future__ import annotations

from collections.abc import Iterable

from server.cache.arena import Arena
from server.cache.layout import Placement
from server.transfer.faults import DAMAGES, Fault, FaultKind


class Damage:
    """Applies :data:`DAMAGES` to live rows, and remembers the rows of the last room, which ``stale`` sends again."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._before: dict[str, bytes] = {}

    def apply(self, faults: Iterable[Fault], n: int, placement: Placement) -> None:
        """Damages the state of a prompt of ``n`` tokens. Call it when nothing of the room has been sent."""
        damages = [fault for fault in faults if fault.kind in DAMAGES]
        if not damages:
            return
        runs = self._arena.layout.live_runs(n, placement)
        for fault in damages:
            component = self._arena.layout.component(fault.component)
            before = self._arena.read(runs[fault.component])
            after = _damaged(fault.kind, before, self._before.get(fault.component, b""), component.row_nbytes)
            for run in runs[fault.component]:
                self._arena.write(run, after[: run.nbytes])
                after = after[run.nbytes :]
            self._before[fault.component] = before


def _damaged(kind: FaultKind, rows: bytes, stale: bytes, row_nbytes: int) -> bytes:
    match kind:
        case FaultKind.STALE:
            return stale[: len(rows)].ljust(len(rows), b"\0")
        case FaultKind.SHIFT:
            return rows[-row_nbytes:] + rows[:-row_nbytes]
        case _:
            return bytes(len(rows))
