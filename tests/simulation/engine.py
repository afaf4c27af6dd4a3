"""A simulated engine: takes the commands of a node, computes recognisable bytes, and answers after a while, or not.

What it takes over from the cache is proved and restored by the real engine's own code.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import xxhash

from server.cache.arena import Arena
from server.cache.digest import StateDigests
from server.cache.handoff import Handoff, prompt_hash, write_handoff
from server.cache.layout import ComponentLayout, Placement
from server.cache.live import live_positions
from server.cache.owners import WrongOwner
from server.cache.snapshots import Snapshot, SnapshotPoint, restore_snapshot, take_snapshot
from server.cache.specs import HANDOFF, Scope
from server.engine.events import (
    Cancel,
    ChunkComputed,
    Command,
    ComputeFailed,
    Event,
    Finished,
    HitRefused,
    Output,
    Prefill,
    PrefillFinished,
    Prepare,
    Resume,
    Scrub,
    Scrubbed,
    SnapshotTaken,
)
from server.engine.prefix import HitDamaged, TakeOver
from server.engine.request import FinishReason, TokenLogprob, TokenOutput
from server.failure import Failure
from tests.simulation.memory import PAGE_TOKENS, WINDOW, Memory
from tests.support.fake_scores import scored

if TYPE_CHECKING:
    from server.engine.runner import ModelRunner
    from tests.simulation.loop import Process
    from tests.simulation.world import World

N_CHUNKS = 3
STREAMS = (1, 2)
"""The shape of what a snapshot has of the last position."""
PAGED = "c4_kv"


def first_token_of(prompt: Sequence[int]) -> int:
    return sum(prompt) % 897 + 1


def rows_of(tokens: Sequence[int], component: ComponentLayout, rows: range) -> bytes:
    """What the "model" computes for ``rows``: a function of the component and of all tokens up to the row's end."""
    data, found = array("i", tokens), bytearray()
    for row in rows:
        seed = xxhash.xxh3_64_digest(data[: (row + 1) * component.positions].tobytes() + component.name.encode())
        found += (seed * (component.row_nbytes // len(seed) + 1))[: component.row_nbytes]
    return bytes(found)


def streams_of(tokens: Sequence[int], n: int) -> torch.Tensor:
    """What it has of position n - 1."""
    return torch.tensor([[float(sum(tokens[:n])), float(n)]])


class _Runner:
    """What :class:`TakeOver` needs of a runner."""

    drafts = False

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def restore_snapshot(self, placement: Placement, snapshot: Snapshot) -> torch.Tensor:
        return restore_snapshot(self.arena, placement, snapshot, STREAMS, torch.float32)


@dataclass
class _Prompt:
    """A prompt that is computed: up to ``n_computed``, and its chunks end at ``stops``."""

    command: Prefill
    digests: StateDigests
    stops: list[int]
    points: dict[int, SnapshotPoint]
    n_computed: int = 0


@dataclass
class _Answer:
    """A request that is decoded: ``tokens`` are those whose state is in the memory, ``pages`` what they completed."""

    command: Resume
    tokens: list[int]
    pages: list[bytes] = field(default_factory=list)


class SimulatedEngine:
    """Its events go to ``on_event``."""

    def __init__(self, world: World, process: Process, memory: Memory) -> None:
        self.on_event: Callable[[Event], None] = lambda event: None
        self._world, self._process, self._memory = world, process, memory
        self._runner = cast("ModelRunner", _Runner(memory.arena))
        self._running: dict[Hashable, _Prompt | _Answer] = {}
        self._prepared: set[Hashable] = set()

    def submit(self, command: Command) -> None:
        rng, weather = self._world.rng, self._world.weather
        match command:
            case Prefill():
                self._running[command.key] = prompt = self._begin(command)
                if not self._world.hits(weather.engine_hangs):
                    self._later(rng.uniform(0.01, 2.0), lambda: self._compute(prompt))
            case Prepare():
                self._prepared.add(command.key)
            case Resume():
                self._prepared.discard(command.key)
                self._running[command.key] = answer = _Answer(command, list(command.request.prompt_ids))
                self._check_resumed(command)
                self._later(rng.uniform(0.05, 1.5), lambda: self._decode(answer, 0))
            case Cancel():
                self._later(rng.uniform(0, 1.0), lambda: self._cancel(command.key))
            case Scrub():
                self._prepared.discard(command.key)
                self._later(rng.uniform(0, 0.5), lambda: self._scrub(command))
            case _:
                raise TypeError(f"the simulated engine does not know {command}")

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._process.later(delay_s, what)

    def _check_reads(self, key: Hashable, placement: Placement, what: str) -> None:
        self._world.check(self._memory.allocator.reads(key, placement), f"{key} {what} memory that it does not hold")

    # --- prompts ---

    def _begin(self, command: Prefill) -> _Prompt:
        n = len(command.request.prompt_ids)
        start = 0 if command.hit is None else command.hit.n
        points = {point.n: point for point in command.snapshots_at}
        self._world.check(all(start < at <= n for at in points), f"{command.key}: snapshots at {list(points)} of {n}")
        chunks = (start + chunk * (n - start) // N_CHUNKS for chunk in range(1, N_CHUNKS + 1))
        stops = sorted({stop for stop in (*chunks, *points) if stop > start})
        return _Prompt(command, StateDigests(self._memory.arena, n, command.placement), stops, points)

    def _compute(self, prompt: _Prompt) -> None:
        """Takes over what is cached, or computes the next chunk."""
        command = prompt.command
        key = command.key
        if self._running.get(key) is not prompt:
            return
        self._check_reads(key, command.placement, "computes in")
        if self._world.hits(self._world.weather.engine_fails):
            self._fail(key)
            return
        try:
            if command.hit is not None and not prompt.n_computed:
                self._take_over(prompt)
            elif self._compute_chunk(prompt):
                return
        except HitDamaged as damage:
            del self._running[key]
            self.on_event(HitRefused(key, damage.failure, damage.page))
            return
        if self._running.get(key) is prompt:
            self._later(self._world.rng.uniform(0.01, 2.0), lambda: self._compute(prompt))

    def _take_over(self, prompt: _Prompt) -> None:
        command = prompt.command
        if command.hit is None:
            raise RuntimeError(f"{command.key} has nothing to take over")
        take_over = TakeOver(command, command.hit, prompt.digests, self._runner)
        while not take_over.step():
            pass
        prompt.n_computed = take_over.n
        self._check_live(command, take_over.n, "goes on from")
        self._world.seen["hit"] += 1
        self.on_event(ChunkComputed(command.key, take_over.n, tuple(take_over.pages)))

    def _compute_chunk(self, prompt: _Prompt) -> bool:
        """Whether it was the last one."""
        command, stop = prompt.command, prompt.stops.pop(0)
        ids, key = command.request.prompt_ids, command.key
        self._write(key, ids, prompt.n_computed, stop, command.placement)
        for event in scored(key, command.request, prompt.n_computed, stop):
            self.on_event(event)
        prompt.n_computed = stop
        if prompt.stops or stop in prompt.points:
            self.on_event(ChunkComputed(key, stop, prompt.digests.take_pages(stop)))
        if (point := prompt.points.get(stop)) is not None:
            snapshot = take_snapshot(self._memory.arena, command.placement, point, streams_of(ids, stop))
            self.on_event(SnapshotTaken(key, snapshot))
        if prompt.stops:
            return False
        self._finish(prompt)
        return True

    def _finish(self, prompt: _Prompt) -> None:
        command, n = prompt.command, prompt.n_computed
        ids, arena = command.request.prompt_ids, self._memory.arena
        del self._running[command.key]
        first = TokenLogprob(first_token_of(ids), -0.5)
        handoff = Handoff(
            command.room, command.epoch, n, prompt_hash(ids), first.token_id, first.logprob, (), torch.zeros(1, 2)
        )
        write_handoff(arena, command.placement, handoff)
        if command.owner is not None:
            try:
                arena.owners.check(n, command.placement, arena.layout.names, command.owner)
            except WrongOwner as error:
                self._world.check(False, f"{command.key}: {error}")
        pages = prompt.digests.take_pages(n)
        self.on_event(PrefillFinished(command.key, first, prompt.digests.finish(), 0.01, 0.001, pages))

    def _write(self, key: Hashable, tokens: Sequence[int], start: int, stop: int, placement: Placement) -> None:
        """The rows of positions ``start .. stop - 1``."""
        layout = self._memory.arena.layout
        for page in placement.pages[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)]:
            holder = self._memory.allocator.holder_of((Scope.PAGE, page))
            self._world.check(holder == key, f"{key} computes into page {page}, which belongs to {holder}")
        for c in layout.components:
            rows = range(start // c.positions, stop // c.positions)
            if c.scope is Scope.SLOT:
                rows = range(max(start, stop - c.rows), stop)
            data = rows_of(tokens, c, rows) if c.name != HANDOFF else b""
            for run in layout.runs(c.name, rows, placement) if data else ():
                self._memory.arena.write(run, data[: run.nbytes])
                data = data[run.nbytes :]

    # --- answers ---

    def _check_live(self, command: Prefill | Resume, n: int, what: str) -> None:
        """Tokens are computed from memory that was proved: every live row is what the prompt's prefill computes."""
        arena, ids = self._memory.arena, command.request.prompt_ids
        for name, rows in live_positions(n, WINDOW, arena.layout.names).items():
            if name != HANDOFF:
                found = arena.read(arena.layout.runs(name, rows, command.placement))
                is_right = found == rows_of(ids, arena.layout.component(name), rows)
                self._world.check(is_right, f"{command.key} {what} wrong bytes of {name}")

    def _check_resumed(self, command: Resume) -> None:
        key, prompt = command.key, command.request.prompt_ids
        self._check_reads(key, command.placement, "decodes in")
        self._check_live(command, len(prompt), "was committed with")
        self._world.check(command.first.token_id == first_token_of(prompt), f"{key} was committed with a wrong token")
        self._world.committed.add(command.request.request_id)

    def _decode(self, answer: _Answer, n_done: int) -> None:
        command = answer.command
        if self._running.get(command.key) is not answer:
            return
        self._check_reads(command.key, command.placement, "decodes in")
        if self._world.hits(self._world.weather.engine_fails):
            self._fail(command.key)
            return
        token = command.first.token_id + n_done
        if n_done:
            self._extend(answer, token - 1)
        is_last = n_done + 1 == command.request.sampling.max_tokens
        reason = FinishReason.LENGTH if is_last else None
        self.on_event(Output(command.key, TokenOutput((token,), f"{token} ", finish_reason=reason)))
        if is_last:
            self._end(answer, FinishReason.LENGTH)
        else:
            self._later(self._world.rng.uniform(0.05, 1.5), lambda: self._decode(answer, n_done + 1))

    def _extend(self, answer: _Answer, token: int) -> None:
        """The state of one more token."""
        command, n = answer.command, len(answer.tokens)
        answer.tokens.append(token)
        self._write(command.key, answer.tokens, n, n + 1, command.placement)
        if not (n + 1) % PAGE_TOKENS:
            page = command.placement.pages[n // PAGE_TOKENS]
            digests = StateDigests(self._memory.arena, PAGE_TOKENS, Placement(0, (page,)), (PAGED,))
            answer.pages += digests.take_pages(PAGE_TOKENS)

    # --- both ---

    def _end(self, ended: _Prompt | _Answer, reason: FinishReason) -> None:
        key = ended.command.key
        if self._running.pop(key, None) is not ended:
            return
        if isinstance(ended, _Answer):
            self.on_event(Finished(key, reason, tuple(ended.tokens), tuple(ended.pages)))
        else:
            self.on_event(Finished(key, reason))

    def _fail(self, key: Hashable) -> None:
        del self._running[key]
        self.on_event(ComputeFailed(key, Failure("engine_error", "simulated")))

    def _cancel(self, key: Hashable) -> None:
        if (running := self._running.get(key)) is not None:
            self._end(running, FinishReason.ABORT)

    def _scrub(self, command: Scrub) -> None:
        self._check_reads(command.key, command.placement, "scrubs")
        self._world.check(command.key not in self._running, f"{command.key} was scrubbed while it was computed")
        self.on_event(Scrubbed(command.key))
