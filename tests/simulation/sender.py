"""A simulated sender: batches arrive, are refused, or end with a fate that nobody knows and land much later."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.cache.layout import Run
from server.prefill.kv_sender import Piece, SendJob, SendOutcome, SendResult
from server.transfer.rooms import RoomKey
from tests.simulation.memory import Memory, Write

if TYPE_CHECKING:
    from tests.simulation.loop import Process
    from tests.simulation.world import World

LONGEST_FLIGHT_S = 4.0


@dataclass(eq=False)
class _Batch:
    job: SendJob
    is_cancelled: bool = False


class SimulatedSender:
    """A :class:`~server.prefill.kv_sender.Sender` of one registration. It reads from ``memory`` when bytes arrive."""

    thread = None

    def __init__(
        self, world: World, process: Process, memory: Memory, session: str, on_result: Callable[[SendResult], None]
    ) -> None:
        self._world, self._process, self._memory, self._session = world, process, memory, session
        self._on_result = on_result
        self._flying: list[_Batch] = []
        self._unknown: Counter[Hashable] = Counter()
        self._is_closed = False

    def start(self) -> None:
        pass

    def send(self, job: SendJob) -> None:
        world = self._world
        world.check(not self._is_closed, f"{job.key} was given to a closed sender")
        batch = _Batch(job)
        self._flying.append(batch)
        flight_s = world.rng.uniform(0, LONGEST_FLIGHT_S)
        if world.hits(world.weather.refused):
            self._later(flight_s, lambda: self._end(batch, SendOutcome.REFUSED))
        elif world.hits(world.weather.unknown):
            for write in self._writes(job):  # they still land, perhaps much later
                world.later(world.rng.uniform(0, world.latest_s), world.sessions.land, write)
            self._later(flight_s, lambda: self._end(batch, SendOutcome.UNKNOWN))
        elif not world.hits(world.weather.hangs):
            self._later(flight_s, lambda: self._arrive(batch))

    def cancel(self, key: Hashable) -> None:
        for batch in self._flying:
            if batch.job.key == key and self._world.rng.random() < 0.5:
                batch.is_cancelled = True  # nothing of it was submitted yet

    def forget(self, key: Hashable) -> None:
        del self._unknown[key]

    async def aclose(self, timeout_s: float) -> bool:
        self._is_closed = True
        await asyncio.sleep(self._world.rng.uniform(0, timeout_s))
        for batch in list(self._flying):
            self._end(batch, SendOutcome.UNKNOWN)
        return True

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._process.later(delay_s, what)

    def _writes(self, job: SendJob) -> list[Write]:
        return [self._write(job.key, piece) for piece in job.pieces]

    def _write(self, key: Hashable, piece: Piece) -> Write:
        memory, offset = self._memory, piece.src - self._memory.arena.ptr
        for item in memory.items.items(offset, piece.nbytes) if isinstance(key, RoomKey) else ():
            is_own = item is not None and memory.allocator.is_read_by(key, item)
            holder = None if item is None else memory.allocator.holder_of(item)
            self._world.check(is_own, f"{key} sends {item}, which belongs to {holder}")
        data = memory.arena.read([Run(offset, piece.nbytes)])
        if self._world.hits(self._world.weather.bad_bytes):
            data = bytes((data[0] ^ 0xFF,)) + data[1:]
        return Write(key, self._session, piece.dst, data)

    def _arrive(self, batch: _Batch) -> None:
        """The bytes are read here and land there, in one moment; the sender learns of it a little later."""
        if batch not in self._flying:
            return
        if batch.is_cancelled:
            self._end(batch, SendOutcome.CANCELLED)
            return
        landed = [self._world.sessions.land(write) for write in self._writes(batch.job)]
        outcome = SendOutcome.APPLIED if all(landed) else SendOutcome.UNKNOWN
        self._later(self._world.rng.uniform(0, 0.2), lambda: self._end(batch, outcome))

    def _end(self, batch: _Batch, outcome: SendOutcome) -> None:
        if batch not in self._flying:
            return
        self._flying.remove(batch)
        key, job = batch.job.key, batch.job
        self._unknown[key] += outcome is SendOutcome.UNKNOWN
        is_quiesced = not self._unknown[key] and all(other.job.key != key for other in self._flying)
        nbytes = Counter[str]()
        for piece in job.pieces if outcome is SendOutcome.APPLIED else ():
            nbytes[piece.component] += piece.nbytes
        reason = "" if outcome is SendOutcome.APPLIED else f"simulated: {outcome}"
        pieces = len(job.pieces) if outcome is SendOutcome.APPLIED else 0
        self._on_result(SendResult(key, job.batch_id, outcome, reason, dict(nbytes), pieces, is_quiesced))
