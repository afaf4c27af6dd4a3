"""A prefill and a decode node in one process, with real engines, real ZMQ and real Mooncake, so that tests can see
both arenas.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry

from server.cache.allocator import Allocator
from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import DRAFT, CacheGeometry, ComponentSpec
from server.decode.node import DecodeNode
from server.decode.settings import DecodeSettings
from server.engine.engine import Engine
from server.engine.events import Command, Event, Prefill, PrefillFinished, Resume
from server.engine.request import GenerationRequest, RouteInfo, SamplingParams, TokenOutput
from server.engine.runner import ModelRunner
from server.engine.tokenizer import Tokenizer
from server.faults.injection import hooks_of
from server.faults.spec import FaultSet
from server.kernels.choice import choose_kernels
from server.model.interface import LoadedModel
from server.model.state import state_components
from server.node.context import NodeContext
from server.prefill.node import PrefillNode, PrefillSettings
from server.transfer.engines.base import TransferEngine
from server.transfer.engines.mooncake import MooncakeEngine
from server.transfer.manifest import ModelIdentity
from server.transfer.metrics import NodeMetrics
from server.transfer.rooms import Deadlines
from tests.support.waiting import until

SAME = ModelIdentity("model", "tokenizer", "float32", "kernels")
Specs = tuple[ComponentSpec, ...]

_ids = itertools.count()


def unchanged(specs: Specs) -> Specs:
    return specs


@dataclass(frozen=True)
class Side:
    """How one node of a test is set up. ``spec_tokens`` sizes the rings; with ``draft`` D also drafts that many."""

    spec_tokens: int = 0
    draft: bool = False
    cold_draft: bool = False
    chunk_tokens: int = 64
    pages: int = 80
    slots: int = 20
    page_size: int = 256
    permute_seed: int | None = 1
    poison: bool = True
    kv_dtype: str = "model"
    index_dtype: str = "auto"
    identity: ModelIdentity = SAME
    components: Callable[[Specs], Specs] = unchanged
    faults: tuple[str, ...] = ()
    deadlines: Deadlines = field(default_factory=Deadlines)


class TestNode:
    """One node with its engine and its memory; ``commands`` and ``events`` record what passed between them."""

    __test__ = False

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, side: Side) -> None:
        components = side.components(
            state_components(
                model.config,
                "float32",
                side.spec_tokens,
                draft=side.draft,
                kv_dtype=side.kv_dtype,
                index_dtype=side.index_dtype,
            )
        )
        geometry = CacheGeometry(
            side.page_size, side.pages + 1, side.slots + 1, model.config.sliding_window, side.spec_tokens, components
        )
        self.side = side
        self.arena = Arena(ArenaLayout.from_geometry(geometry), poison=side.poison)
        self.allocator = Allocator(geometry, permute_seed=side.permute_seed, on_free=self.arena.scrub)
        self.registry = CollectorRegistry()
        self.hooks = hooks_of(FaultSet.parse(side.faults), self.arena)
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.before_command: Callable[[Command], None] = lambda command: None
        self._to_engine: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._runner, self._tokenizer = ModelRunner(model, self.arena), tokenizer
        self.max_context = min(model.config.max_position_embeddings, self.allocator.capacity_tokens)

    def context(self, make_transport: Callable[[], TransferEngine]) -> NodeContext:
        return NodeContext(
            submit_command=self._submit,
            make_transport=make_transport,
            arena=self.arena,
            allocator=self.allocator,
            identity=self.side.identity,
            tokenizer=self._tokenizer,
            sampling_defaults=SamplingParams(),
            metrics=NodeMetrics(self.registry),
            hooks=self.hooks,
        )

    def settings(self) -> dict[str, Any]:
        return {"model_name": "test", "max_context": self.max_context, "deadlines": self.side.deadlines}

    @contextlib.asynccontextmanager
    async def running(self, node: PrefillNode | DecodeNode, *, spec_tokens: int = 0) -> AsyncIterator[None]:
        """The engine and ``node``, which is made with this side's context."""

        def record(event: Event) -> None:
            self.events.append(event)
            node.on_engine_event(event)

        self.engine = Engine(
            self._runner,
            self._tokenizer,
            record,
            commands=self._to_engine,
            chunk_tokens=self.side.chunk_tokens,
            spec_tokens=spec_tokens,
            cold_draft=self.side.cold_draft,
            sample_kernel=choose_kernels("auto", "cpu").sampler(1),
        )
        self.engine.start()
        try:
            await node.start()
            yield
        finally:
            await node.stop()
            await asyncio.to_thread(self.engine.stop)

    def _submit(self, command: Command) -> None:
        self.commands.append(command)
        self.before_command(command)
        self._to_engine.put(command)

    @property
    def free(self) -> tuple[int, int]:
        counts = self.allocator.counts()
        return counts["slots"]["free"], counts["pages"]["free"]

    @property
    def all_free(self) -> bool:
        return self.free == (self.side.slots, self.side.pages)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


class Pair:
    """A running pair: ``p`` and ``d`` with their nodes."""

    def __init__(self, p: TestNode, prefill: PrefillNode, d: TestNode, decode: DecodeNode) -> None:
        self.p, self.prefill, self.d, self.decode = p, prefill, d, decode

    async def answer(self, request: GenerationRequest) -> tuple[list[TokenOutput], RouteInfo]:
        return await answer(self.decode, request)

    def placements(self, request: GenerationRequest) -> tuple[Placement, Placement]:
        """Where the request's prompt lay on P and on D."""
        (at_p,) = [
            c.placement
            for c in self.p.commands
            if isinstance(c, Prefill) and c.request.prompt_ids == request.prompt_ids
        ]
        (at_d,) = [
            c.placement for c in self.d.commands if isinstance(c, Resume) and c.request.prompt_ids == request.prompt_ids
        ]
        return at_p, at_d

    def prefill_finished(self) -> list[PrefillFinished]:
        return [event for event in self.p.events if isinstance(event, PrefillFinished)]

    async def settled(self, timeout_s: float = 20.0) -> None:
        """Waits until every slot and page of both nodes is free again."""
        await until(lambda: self.p.all_free and self.d.all_free, timeout_s, "every slot and page is free")


async def answer(node: DecodeNode, request: GenerationRequest) -> tuple[list[TokenOutput], RouteInfo]:
    """Every output of one request, and who served it."""
    generation = node.submit(request)
    route = await generation.route()
    return [output async for output in generation], route


def tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def a_request(prompt_ids: Sequence[int], **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})
    return GenerationRequest(f"test-{next(_ids)}", tuple(prompt_ids), params)


@contextlib.asynccontextmanager
async def running_prefill(
    model: LoadedModel,
    tokenizer: Tokenizer,
    side: Side,
    *,
    port: int = 0,
    transport: Callable[[], TransferEngine] = MooncakeEngine,
) -> AsyncIterator[tuple[TestNode, PrefillNode]]:
    p = TestNode(model, tokenizer, side)
    settings = PrefillSettings(**p.settings(), bootstrap_port=port, spec_tokens=side.spec_tokens)
    node = PrefillNode(settings, p.context(transport))
    async with p.running(node):
        yield p, node


@contextlib.asynccontextmanager
async def running_decode(
    model: LoadedModel,
    tokenizer: Tokenizer,
    side: Side,
    peers: tuple[str, ...] | None,
    *,
    transport: Callable[[], TransferEngine] = MooncakeEngine,
) -> AsyncIterator[tuple[TestNode, DecodeNode]]:
    d = TestNode(model, tokenizer, side)
    settings = DecodeSettings(
        **d.settings(),
        prefill=peers,
        spec_tokens=side.spec_tokens if side.draft else 0,
        own_components=frozenset({DRAFT}) if side.cold_draft else frozenset(),
    )
    node = DecodeNode(settings, d.context(transport))
    async with d.running(node, spec_tokens=settings.spec_tokens):
        yield d, node


@contextlib.asynccontextmanager
async def running_pair(
    model: LoadedModel,
    tokenizer: Tokenizer,
    p: Side | None = None,
    d: Side | None = None,
    *,
    transport: Callable[[], TransferEngine] = MooncakeEngine,
) -> AsyncIterator[Pair]:
    """Both nodes, connected. D's ids are permuted otherwise than P's."""
    p_side, d_side = p or Side(), d or replace(Side(), permute_seed=2)
    async with running_prefill(model, tokenizer, p_side, transport=transport) as (p_node, prefill):
        address = f"127.0.0.1:{prefill.bootstrap_port}"
        async with running_decode(model, tokenizer, d_side, (address,), transport=transport) as (d_node, decode):
            await registered(decode)
            yield Pair(p_node, prefill, d_node, decode)


async def registered(decode: DecodeNode, timeout_s: float = 20.0) -> None:
    """Waits until a decode node has a peer (or has been refused by one)."""
    known = ("registered", "refused")
    await until(lambda: any(peer["state"] in known for peer in peers_of(decode)), timeout_s, "a peer is known")


def peers_of(decode: DecodeNode) -> list[dict[str, Any]]:
    peers: list[dict[str, Any]] = decode.server_info()["peers"]
    return peers
