"""A simulated engine: takes the commands of a node, computes recognisable bytes, and answers after a while, or not."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from server.cache.digest import live_digests
from server.cache.handoff import Handoff, prompt_hash, write_handoff
from server.cache.layout import Placement
from server.cache.live import live_positions
from server.cache.specs import HANDOFF, Scope
from server.engine.events import (
    Cancel,
    ChunkComputed,
    Command,
    ComputeFailed,
    Event,
    Finished,
    Output,
    Prefill,
    PrefillFinished,
    Prepare,
    Resume,
    Scrub,
    Scrubbed,
)
from server.engine.request import FinishReason, TokenLogprob, TokenOutput
from server.failure import Failure
from tests.simulation.memory import WINDOW, Memory
from tests.support.fake_scores import scored

if TYPE_CHECKING:
    from tests.simulation.loop import Process
    from tests.simulation.world import World

N_CHUNKS = 3


def first_token_of(prompt: tuple[int, ...]) -> int:
    return sum(prompt) % 997 + 1


def rows_of(prompt: tuple[int, ...], name: str, rows: range, nbytes: int) -> bytes:
    """What the "model" computes for ``rows`` of ``nbytes`` each: a function of prompt, component and row."""
    seed = sum(prompt) * 31 + len(name)
    return b"".join(bytes((seed + 7 * row + column) % 251 for column in range(nbytes)) for row in rows)


class SimulatedEngine:
    """Its events go to ``on_event``."""

    def __init__(self, world: World, process: Process, memory: Memory) -> None:
        self.on_event: Callable[[Event], None] = lambda event: None
        self._world, self._process, self._memory = world, process, memory
        self._running: set[Hashable] = set()
        self._prepared: set[Hashable] = set()

    def submit(self, command: Command) -> None:
        rng, weather = self._world.rng, self._world.weather
        match command:
            case Prefill():
                self._running.add(command.key)
                if not self._world.hits(weather.engine_hangs):
                    self._later(rng.uniform(0.01, 2.0), lambda: self._compute(command, 1))
            case Prepare():
                self._prepared.add(command.key)
            case Resume():
                self._prepared.discard(command.key)
                self._running.add(command.key)
                self._check_resumed(command)
                self._later(rng.uniform(0.05, 1.5), lambda: self._decode(command, 0))
            case Cancel():
                self._later(rng.uniform(0, 1.0), lambda: self._cancel(command.key))
            case Scrub():
                self._prepared.discard(command.key)
                self._later(rng.uniform(0, 0.5), lambda: self._scrub(command))
            case _:
                raise TypeError(f"the simulated engine does not know {command}")

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._process.later(delay_s, what)

    def _check_holds(self, key: Hashable, placement: Placement, what: str) -> None:
        self._world.check(self._memory.allocator.holds(key, placement), f"{key} {what} memory that it does not hold")

    # --- prompts ---

    def _compute(self, command: Prefill, chunk: int) -> None:
        if command.key not in self._running:
            return
        prompt, n = command.request.prompt_ids, len(command.request.prompt_ids)
        self._check_holds(command.key, command.placement, "computes in")
        if self._world.hits(self._world.weather.engine_fails):
            self._running.remove(command.key)
            self.on_event(ComputeFailed(command.key, Failure("engine_error", "simulated")))
            return
        start, stop = (chunk - 1) * n // N_CHUNKS, chunk * n // N_CHUNKS
        self._write(prompt, start, stop, command.placement)
        for event in scored(command.key, command.request, start, stop):
            self.on_event(event)
        if chunk < N_CHUNKS:
            self.on_event(ChunkComputed(command.key, stop))
            self._later(self._world.rng.uniform(0.01, 2.0), lambda: self._compute(command, chunk + 1))
            return
        self._running.remove(command.key)
        first = TokenLogprob(first_token_of(prompt), -0.5)
        arena = self._memory.arena
        handoff = Handoff(
            command.room, command.epoch, n, prompt_hash(prompt), first.token_id, first.logprob, (), torch.zeros(1, 2)
        )
        write_handoff(arena, command.placement, handoff)
        self.on_event(PrefillFinished(command.key, first, live_digests(arena, n, command.placement), 0.01, 0.001))

    def _write(self, prompt: tuple[int, ...], start: int, stop: int, placement: Placement) -> None:
        layout = self._memory.arena.layout
        for c in layout.components:
            rows = range(start // c.positions, stop // c.positions)
            if c.scope is Scope.SLOT:
                rows = range(max(start, stop - c.rows), stop)
            data = rows_of(prompt, c.name, rows, c.row_nbytes) if c.name != HANDOFF else b""
            for run in layout.runs(c.name, rows, placement) if data else ():
                self._memory.arena.write(run, data[: run.nbytes])
                data = data[run.nbytes :]

    # --- answers ---

    def _check_resumed(self, command: Resume) -> None:
        """Tokens are computed from memory that was proved: every live row is what the prompt's prefill computes."""
        key, prompt, arena = command.key, command.request.prompt_ids, self._memory.arena
        self._check_holds(key, command.placement, "decodes in")
        for name, rows in live_positions(len(prompt), WINDOW, arena.layout.names).items():
            if name != HANDOFF:
                wanted = rows_of(prompt, name, rows, arena.layout.component(name).row_nbytes)
                found = arena.read(arena.layout.runs(name, rows, command.placement))
                self._world.check(found == wanted, f"{key} was committed with wrong bytes of {name}")
        self._world.check(command.first.token_id == first_token_of(prompt), f"{key} was committed with a wrong token")
        self._world.committed.add(command.request.request_id)

    def _decode(self, command: Resume, n_done: int) -> None:
        if command.key not in self._running:
            return
        self._check_holds(command.key, command.placement, "decodes in")
        if self._world.hits(self._world.weather.engine_fails):
            self._running.remove(command.key)
            self.on_event(ComputeFailed(command.key, Failure("engine_error", "simulated")))
            return
        token = command.first.token_id + n_done
        is_last = n_done + 1 == command.request.sampling.max_tokens
        reason = FinishReason.LENGTH if is_last else None
        self.on_event(Output(command.key, TokenOutput((token,), f"{token} ", finish_reason=reason)))
        if is_last:
            self._running.remove(command.key)
            self.on_event(Finished(command.key, FinishReason.LENGTH))
        else:
            self._later(self._world.rng.uniform(0.05, 1.5), lambda: self._decode(command, n_done + 1))

    # --- both ---

    def _cancel(self, key: Hashable) -> None:
        if key in self._running:
            self._running.remove(key)
            self.on_event(Finished(key, FinishReason.ABORT))

    def _scrub(self, command: Scrub) -> None:
        self._check_holds(command.key, command.placement, "scrubs")
        self._world.check(command.key not in self._running, f"{command.key} was scrubbed while it was computed")
        self._memory.arena.scrub(command.placement)
        self.on_event(Scrubbed(command.key))
