"""Both nodes in one process, over real ZMQ, with an engine that computes recognisable bytes instead of a model."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from prometheus_client import CollectorRegistry

from server.cache.allocator import Allocator
from server.cache.arena import Arena
from server.cache.digest import StateDigests
from server.cache.handoff import Handoff, prompt_hash, write_handoff
from server.cache.layout import ArenaLayout, ComponentLayout, Placement
from server.cache.live import live_positions
from server.cache.prefix import PrefixCache
from server.cache.snapshots import restore_snapshot, take_snapshot
from server.cache.specs import HANDOFF, CacheGeometry
from server.decode.node import DecodeNode
from server.decode.settings import DecodeSettings
from server.engine.events import (
    Cancel,
    ChunkComputed,
    Command,
    ComputeFailed,
    Event,
    Finished,
    Generate,
    HitRefused,
    Output,
    Prefill,
    PrefillFinished,
    Resume,
    Scrub,
    Scrubbed,
    SnapshotTaken,
    Stop,
)
from server.engine.request import FinishReason, GenerationRequest, SamplingParams, TokenLogprob, TokenOutput
from server.failure import Failure
from server.faults.injection import hooks_of
from server.faults.spec import FaultSet
from server.node.context import NodeContext
from server.prefill.decode_peer import DecodePeer
from server.prefill.node import PrefillNode, PrefillSettings
from server.telemetry.traces import TraceExporter
from server.transfer.auth import Guard
from server.transfer.engines.base import TransferEngine
from server.transfer.engines.loopback import LoopbackEngine
from server.transfer.manifest import ModelIdentity
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import PeerMessage
from server.transfer.rooms import Deadlines
from tests.support.fake_scores import scored
from tests.support.fake_tokenizer import VOCABULARY, FakeTokenizer
from tests.support.waiting import until
from tests.transfer.support import IDENTITY, PAGE_SIZE, WINDOW, make_geometry

COMPONENTS = [spec.name for spec in make_geometry().components]
FAST = Deadlines(peer_s=2.5, ping_s=0.2, reserve_s=3.0, quiesce_s=2.0, probe_s=1.0, transfer_s=3.0, resend_s=0.2)


STREAMS = torch.zeros(2, 8)
"""Of every position."""


def first_token_of(prompt: tuple[int, ...]) -> int:
    return (sum(prompt) * 31 + len(prompt)) % (VOCABULARY - 1) + 1


def rows_bytes(ids: tuple[int, ...], component: ComponentLayout, rows: range) -> bytes:
    """What the "model" computes for ``rows``: a function of component, row, and the tokens up to the row's end."""
    ends = np.arange(rows.start + 1, rows.stop + 1) * component.positions - 1
    column = np.arange(component.row_nbytes, dtype=np.uint64)
    mixed = (_prefixes(ids)[ends][:, None] + column + np.uint64(_seed(component.name))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(56)).astype(np.uint8).tobytes()


@functools.lru_cache(maxsize=4096)
def _prefixes(ids: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """A hash of the first 1, 2, ... tokens."""
    powers = np.full(len(ids), 0xD6E8FEB86659FD93, dtype=np.uint64).cumprod()
    return np.cumsum(np.array(ids, dtype=np.uint64) * powers)


@functools.lru_cache(maxsize=64)
def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")


class FakeEngine(threading.Thread):
    """Obeys the commands of a node like the real engine; ``gate`` cleared stops it inside a prompt or an answer.

    With ``digest_pages`` it writes the rows of answers too, and reports their pages.
    """

    def __init__(self, arena: Arena, chunk_tokens: int = 200, *, digest_pages: bool = False) -> None:
        super().__init__(name="fake engine", daemon=True)
        self.arena = arena
        self.chunk_tokens = chunk_tokens
        self.digest_pages = digest_pages
        self.on_event: Callable[[Event], None] = lambda event: None
        self.gate = threading.Event()
        self.gate.set()
        self.fail_next = self.fail_answers = False
        self.prefilled: list[Hashable] = []
        self.wrong_bytes: list[str] = []
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._todo: list[Prefill | Generate | Resume] = []
        self._answers: dict[Hashable, tuple[Generate | Resume, int]] = {}
        self._steps: dict[Hashable, int] = {}
        self._digests: dict[Hashable, StateDigests] = {}

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def n_decoding(self) -> int:
        return len(self._answers)

    def run(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=0.002 if self._todo or self._answers else 0.2)
            except queue.Empty:
                command = None
            match command:
                case Stop():
                    return
                case Cancel(key):
                    self._cancel(key)
                case Scrub(key):
                    self.on_event(Scrubbed(key))
                case Resume():
                    self._check(command)
                    self._answers[command.key] = (command, 0)
                    self._emit(command.key)
                case Prefill() | Generate():
                    self._todo.append(command)
                case _:
                    pass
            if command is None and self.gate.is_set():
                self._advance()

    def _advance(self) -> None:
        for command in self._todo[:1]:
            self.compute(command)
        for key in list(self._answers):
            if self.fail_answers:
                del self._answers[key]
                self.on_event(ComputeFailed(key, Failure("engine_error", "the fake engine was told to fail")))
            else:
                self._emit(key)

    def _cancel(self, key: Hashable) -> None:
        if key in self._answers:
            self._finish(key, FinishReason.ABORT)
        elif any(c.key == key for c in self._todo):
            self._todo = [c for c in self._todo if c.key != key]
            self._forget(key)
            self.on_event(Finished(key, FinishReason.ABORT))

    def _forget(self, key: Hashable) -> None:
        self._steps.pop(key, None)
        self._digests.pop(key, None)

    def compute(self, command: Prefill | Generate | Resume) -> None:
        prompt, n = command.request.prompt_ids, len(command.request.prompt_ids)
        if self.fail_next:
            self.fail_next = False
            self._todo.remove(command)
            self.on_event(ComputeFailed(command.key, Failure("engine_error", "the fake engine was told to fail")))
            return
        if command.key not in self._steps and not self._begin(command):
            self._todo.remove(command)
            return
        start, digests = self._steps[command.key], self._digests[command.key]
        points = {point.n: point for point in command.snapshots_at} if isinstance(command, Prefill) else {}
        stop = min([n, start + self.chunk_tokens, *(at for at in points if at > start)])
        self._steps[command.key] = stop
        self._write(prompt, start, stop, command.placement)
        for event in scored(command.key, command.request, start, stop):
            self.on_event(event)
        if stop < n or stop in points:
            self.on_event(ChunkComputed(command.key, stop, digests.take_pages(stop)))
        if stop in points:
            snapshot = take_snapshot(self.arena, command.placement, points[stop], STREAMS)
            self.on_event(SnapshotTaken(command.key, snapshot))
        if stop < n:
            return
        self._todo.remove(command)
        self._forget(command.key)
        first = TokenLogprob(first_token_of(prompt), -0.5, ((7, -0.5), (9, -1.5)))
        if isinstance(command, Prefill):
            handoff = Handoff(
                command.room,
                command.epoch,
                n,
                prompt_hash(prompt),
                first.token_id,
                first.logprob,
                first.top,
                STREAMS,
            )
            write_handoff(self.arena, command.placement, handoff)
            self.prefilled.append(command.key)
            pages = digests.take_pages(n)
            self.on_event(PrefillFinished(command.key, first, digests.finish(), 0.01, 0.001, pages))
        elif not command.request.sampling.max_tokens:
            self.on_event(Output(command.key, TokenOutput((), "", finish_reason=FinishReason.LENGTH)))
            self.on_event(Finished(command.key, FinishReason.LENGTH))
        else:
            self._answers[command.key] = (command, 0)
            self._emit(command.key)

    def _begin(self, command: Prefill | Generate | Resume) -> bool:
        """Takes over what was found in the cache; False if that is refused."""
        digests = StateDigests(self.arena, len(command.request.prompt_ids), command.placement)
        hit = command.hit if isinstance(command, Prefill) else None
        if hit is not None and isinstance(command, Prefill):
            pages = digests.take_pages(hit.n)
            wrong = [cached for cached, digest in zip(hit.pages, pages, strict=True) if cached.digest != digest]
            damage = "page" if wrong else hit.snapshot.damage(hit.point)
            if command.hit_is_checked and damage is not None:
                failure = Failure("prefix_damaged", damage, check="hit")
                self.on_event(HitRefused(command.key, failure, wrong[0].index if wrong else None))
                return False
            restore_snapshot(self.arena, command.placement, hit.snapshot, tuple(STREAMS.shape), STREAMS.dtype)
            self.on_event(ChunkComputed(command.key, hit.n, pages))
        self._steps[command.key], self._digests[command.key] = hit.n if hit is not None else 0, digests
        return True

    def _write(self, ids: tuple[int, ...], start: int, stop: int, placement: Placement) -> None:
        """Rows of positions ``start .. stop - 1``: compressed entries that close in them, and the ring rows."""
        layout = self.arena.layout
        if start < stop and start < placement.read_only * layout.page_size:
            self.wrong_bytes.append("shared page")
        for c in layout.components:
            if c.name == HANDOFF:
                continue
            rows = range(start // c.positions, stop // c.positions)
            if c.scope == "slot":
                rows = range(max(start, stop - c.rows), stop)
            data = rows_bytes(ids, c, rows)
            for run in layout.runs(c.name, rows, placement):
                self.arena.write(run, data[: run.nbytes])
                data = data[run.nbytes :]

    def _check(self, command: Resume) -> None:
        """The decode side of the fake: every live row must be what the prompt's prefill computes."""
        prompt = command.request.prompt_ids
        for name, rows in live_positions(len(prompt), WINDOW, self.arena.layout.names).items():
            if name == HANDOFF:
                continue
            expected = rows_bytes(prompt, self.arena.layout.component(name), rows)
            if self.arena.read(self.arena.layout.runs(name, rows, command.placement)) != expected:
                self.wrong_bytes.append(name)
        if command.first.token_id != first_token_of(prompt):
            self.wrong_bytes.append("first token")
        if command.placement.read_only != len(prompt) // self.arena.layout.page_size:
            self.wrong_bytes.append("read only")

    def _emit(self, key: Hashable) -> None:
        command, n_done = self._answers[key]
        request = command.request
        token = first_token_of(request.prompt_ids) + n_done
        is_last = n_done + 1 == request.sampling.max_tokens
        reason = FinishReason.LENGTH if is_last else None
        self._answers[key] = (command, n_done + 1)
        self.on_event(Output(key, TokenOutput((token,), f"{token} ", finish_reason=reason)))
        if is_last:
            self._finish(key, FinishReason.LENGTH)

    def _finish(self, key: Hashable, reason: FinishReason) -> None:
        """The state of all tokens is in the pools but that of the last one given out."""
        command, n_done = self._answers.pop(key)
        prompt, placement = command.request.prompt_ids, command.placement
        if not self.digest_pages or isinstance(command, Generate):
            self.on_event(Finished(key, reason))
            return
        ids = prompt + tuple(first_token_of(prompt) + i for i in range(n_done - 1))
        self._write(ids, len(prompt), len(ids), placement)
        pages = StateDigests(self.arena, len(ids), placement).take_pages(len(ids))
        self.on_event(Finished(key, reason, ids, pages[len(prompt) // self.arena.layout.page_size :]))


@dataclass
class NodeUnderTest:
    node: Any
    engine: FakeEngine
    parts: NodeContext

    @property
    def arena(self) -> Arena:
        return self.parts.arena

    def counts(self) -> dict[str, dict[str, int]]:
        return self.parts.allocator.counts()

    def metric(self, name: str, **labels: str) -> float:
        return self.parts.metrics.registry.get_sample_value(name, labels) or 0.0


@dataclass
class Pair:
    """Starts and stops nodes, which keep prefixes if they ``reuse`` them; what is left is stopped at the end."""

    make_transport: Callable[[], TransferEngine]
    started: list[NodeUnderTest] = field(default_factory=list)
    transports: list[TransferEngine] = field(default_factory=list)

    def transport(self) -> TransferEngine:
        engine = self.make_transport()
        self.transports.append(engine)
        return engine

    async def prefill(
        self,
        *,
        port: int = 0,
        geometry: CacheGeometry | None = None,
        identity: ModelIdentity = IDENTITY,
        faults: tuple[str, ...] = (),
        deadlines: Deadlines = FAST,
        max_queue: int = 1024,
        make_transport: Callable[[], TransferEngine] | None = None,
        guard: Guard | None = None,
        host: str = "127.0.0.1",
        traces: TraceExporter | None = None,
        reuse: bool = False,
    ) -> NodeUnderTest:
        settings = PrefillSettings(
            model_name="fake",
            max_context=4096,
            bootstrap_host=host,
            bootstrap_port=port,
            guard=guard or Guard(),
            deadlines=deadlines,
            max_queue=max_queue,
        )
        bare = _bare(
            geometry or make_geometry(),
            11,
            make_transport or self.transport,
            identity,
            faults,
            traces=traces,
            reuse=reuse,
        )
        bare.node = PrefillNode(settings, bare.parts)
        return await self._start(bare)

    async def decode(
        self,
        *prefills: NodeUnderTest | str,
        geometry: CacheGeometry | None = None,
        deadlines: Deadlines = FAST,
        max_queue: int = 1024,
        local: bool = False,
        own_components: frozenset[str] = frozenset(),
        faults: tuple[str, ...] = (),
        guard: Guard | None = None,
        wait: bool = True,
        traces: TraceExporter | None = None,
        reuse: bool = False,
    ) -> NodeUnderTest:
        addresses = tuple(p if isinstance(p, str) else f"127.0.0.1:{p.node.bootstrap_port}" for p in prefills)
        settings = DecodeSettings(
            model_name="fake",
            max_context=4096,
            prefill=None if local else addresses,
            own_components=own_components,
            guard=guard or Guard(),
            deadlines=deadlines,
            max_queue=max_queue,
        )
        geometry = geometry or make_geometry(extra_rows=2, slots=4, pages=15)
        bare = _bare(geometry, 12, self.transport, faults=faults, traces=traces, reuse=reuse)
        bare.node = node = DecodeNode(settings, bare.parts)
        started = await self._start(bare)
        if wait and not local:
            await until(lambda: all(p["state"] == "registered" for p in node.server_info()["peers"]))
        return started

    async def _start(self, started: NodeUnderTest) -> NodeUnderTest:
        started.engine.on_event = started.node.on_engine_event
        await started.node.start()
        started.engine.start()
        self.started.append(started)
        return started

    async def stop(self, started: NodeUnderTest) -> None:
        self.started.remove(started)
        started.engine.gate.set()
        await started.node.stop()
        started.engine.submit(Stop())
        await asyncio.to_thread(started.engine.join, 5.0)


def _bare(
    geometry: CacheGeometry,
    seed: int,
    make_transport: Callable[[], TransferEngine],
    identity: ModelIdentity = IDENTITY,
    faults: tuple[str, ...] = (),
    traces: TraceExporter | None = None,
    reuse: bool = False,
) -> NodeUnderTest:
    """Everything but the node."""
    arena = Arena(ArenaLayout.from_geometry(geometry), poison=True)
    engine = FakeEngine(arena, digest_pages=reuse)
    allocator = Allocator(geometry, permute_seed=seed, on_free=arena.scrub)
    hooks = hooks_of(FaultSet.parse(faults), arena)
    cache = None
    if reuse:
        cache = PrefixCache(
            allocator, arena.owners, ("fake",), PAGE_SIZE, snapshot_nbytes=1 << 20, key_of=hooks.page_key
        )
    parts = NodeContext(
        submit_command=engine.submit,
        make_transport=make_transport,
        arena=arena,
        allocator=allocator,
        identity=identity,
        tokenizer=FakeTokenizer(),
        sampling_defaults=SamplingParams(),
        metrics=NodeMetrics(CollectorRegistry()),
        hooks=hooks,
        traces=traces,
        prefix_cache=cache,
    )
    return NodeUnderTest(None, engine, parts)


@asynccontextmanager
async def pairs(make_transport: Callable[[], TransferEngine] = LoopbackEngine) -> AsyncIterator[Pair]:
    pair = Pair(make_transport)
    try:
        yield pair
    finally:
        for started in reversed(list(pair.started)):
            await pair.stop(started)


def deaf_to(p: NodeUnderTest, kinds: type | UnionType, monkeypatch: pytest.MonkeyPatch) -> list[PeerMessage]:
    """The prefill node ignores messages of these kinds from now on; those that it has ignored."""
    ignored: list[PeerMessage] = []
    take = p.node.manager.on_message

    def on_message(peer: DecodePeer, message: PeerMessage) -> None:
        if isinstance(message, kinds):
            ignored.append(message)
        else:
            take(peer, message)

    monkeypatch.setattr(p.node.manager, "on_message", on_message)
    return ignored


def request(n: int, seed: int = 0, **sampling: Any) -> GenerationRequest:
    prompt = tuple(int(i) for i in np.random.default_rng([n, seed]).integers(1, VOCABULARY, n))
    return GenerationRequest(f"request-{n}-{seed}", prompt, replace(SamplingParams(max_tokens=4), **sampling))


def expected(asked: GenerationRequest) -> list[int]:
    first = first_token_of(asked.prompt_ids)
    return [first + i for i in range(asked.sampling.max_tokens)]


async def answer(node: DecodeNode, asked: GenerationRequest) -> list[int]:
    return [token async for output in node.submit(asked) for token in output.token_ids]


async def assert_works_again(p: NodeUnderTest, d: NodeUnderTest, n: int = 270) -> None:
    """All memory is free and a new request is right."""
    await until(lambda: all_free(p) and all_free(d), what=f"{p.counts()} {d.counts()}")
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    assert await answer(d.node, request(n, seed=77)) == expected(request(n, seed=77))
    assert d.engine.wrong_bytes == []
    await until(lambda: all_free(p) and all_free(d))


def all_free(side: NodeUnderTest) -> bool:
    return all(n == 0 for kind in side.counts().values() for state, n in kind.items() if state != "free")


async def phase_is(d: NodeUnderTest, phase: str) -> None:
    """Waits until a room of the decode node is in this phase."""

    def entered() -> bool:
        return any(req.room is not None and req.room.phase == phase for req in d.node.manager.reqs.values())

    await until(entered, what=phase)
