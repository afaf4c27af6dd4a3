"""From options that are checked to what a node runs on: the model with its pools, tokenizer, engine and transport.

How a node then runs is in :mod:`server.node.serve`.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, disable_created_metrics

from server.cache.allocator import Allocator
from server.cache.arena import TORCH_DTYPES, Arena
from server.cache.layout import ArenaLayout
from server.cache.prefix import PrefixCache
from server.cache.row_formats import chosen_index_dtype
from server.cache.specs import LayoutError
from server.chat.formats import ChatFormat
from server.chat.registry import ChatFormatMissing, ChatSettings, chat_format
from server.engine.engine import Engine
from server.engine.events import Command, Event
from server.engine.runner import ModelRunner
from server.engine.tokenizer import Tokenizer
from server.faults.hooks import Hooks
from server.faults.injection import hooks_of
from server.faults.spec import FaultSet
from server.kernels.choice import Kernels, choose_kernels
from server.kernels.sampling import SampleKernel
from server.memory import give_back
from server.model.config import CheckpointError, load_config
from server.model.fingerprint import default_cache_dir
from server.model.interface import LoadedModel
from server.model.loader import load_checkpoint
from server.model.numerics import NUMERICS
from server.model.packed import map_checkpoint
from server.node.checks import check_device, transport_factory
from server.node.context import NodeContext, NodeSettings
from server.node.free_memory import FreeMemory, free_memory
from server.node.memory_plan import MemoryPlan, packed_memory, plan_memory, snapshot_size, snapshots_of
from server.node.options import OFF, NodeOptions
from server.node.progress import reading_progress
from server.sizes import size
from server.telemetry.traces import TraceExporter
from server.telemetry.weights import watch_weights
from server.transfer.auth import Guard
from server.transfer.deadlines import parse_deadlines
from server.transfer.manifest import ModelIdentity
from server.transfer.metrics import NodeMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeResources:
    """What a node and its engine are built from. ``commands`` go from one to the other; ``settings`` are the ones that
    both roles have, from the options and the model.
    """

    options: NodeOptions
    runner: ModelRunner
    sample_kernel: SampleKernel | None
    tokenizer: Tokenizer
    commands: queue.SimpleQueue[Command]
    context: NodeContext
    settings: NodeSettings

    def engine(self, on_event: Callable[[Event], None], *, cold_draft: bool = False) -> Engine:
        """The engine that obeys the node's commands."""
        return Engine(
            self.runner,
            self.tokenizer,
            on_event,
            commands=self.commands,
            chunk_tokens=self.options.chunk_tokens,
            threads=self.options.threads,
            spec_tokens=self.settings.spec_tokens,
            cold_draft=cold_draft,
            digest_pages=self.context.prefix_cache is not None,
            sample_kernel=self.sample_kernel,
        )


def build_resources(
    role: str,
    options: NodeOptions,
    guard: Guard | None = None,
    *,
    draft: bool = False,
    spec_tokens: int = 0,
    reuses_prefixes: bool = True,
) -> NodeResources:
    """Loads the checkpoint for a ``prefill`` or ``decode`` node (``role``), with its draft layer if ``draft``, and lays
    out the pools for ``spec_tokens`` draft tokens a step. Only a node that ``reuses_prefixes`` has a cache of them.

    Raises one of :data:`server.node.run.STARTUP_ERRORS`.
    """
    disable_created_metrics()  # a second line for every counter, which nobody reads
    faults, deadlines = FaultSet.parse(options.faults, role), parse_deadlines(options.deadlines)
    check_device(options.device)
    kernels = choose_kernels(options.kernels, options.device)
    log.info("%s kernels (%s)", kernels.identity, kernels.reason)
    tokenizer = _load_tokenizer(options.model, options.default_max_tokens)
    chat = _chat_format(tokenizer, options)
    free = _free_memory(options.device)
    budget = packed_memory(options, free)
    config, takes_snapshots = load_config(options.model), role == "prefill"
    plan = plan_memory(
        config,
        options,
        free,
        draft=draft,
        spec_tokens=spec_tokens,
        packed_memory=budget,
        takes_snapshots=takes_snapshots,
    )
    for line in plan.lines():
        log.info("memory: %s", line)
    loaded = _load_model(options, kernels, budget, draft=draft)
    model = loaded.model
    arena = _make_arena(plan, options)
    allocator = Allocator(plan.geometry, permute_seed=options.permute_ids, on_free=arena.scrub)
    runner, commands = ModelRunner(model, arena), queue.SimpleQueue[Command]()
    metrics = NodeMetrics(CollectorRegistry())

    def weights() -> dict[str, Any]:
        return asdict(model.weights_state())

    identity = ModelIdentity(
        model=loaded.fingerprint,
        tokenizer=tokenizer.fingerprint,
        dtype=options.dtype,
        kernels=kernels.identity,
        numerics=options.numerics,
        deterministic=options.deterministic,
    )
    hooks = hooks_of(faults, arena)
    cache = None
    if reuses_prefixes and options.prefix_cache != OFF:
        snapshots = 0
        if takes_snapshots:
            snapshots = snapshots_of(options, plan.geometry, snapshot_size(config, plan.geometry, options.dtype)).nbytes
        cache = _prefix_cache(options, identity, arena, allocator, hooks, runner.drafts, snapshots)
        metrics.watch_prefix(cache)
    metrics.show_kernels(kernels.identity, kernels.reason)
    if options.weights == "packed":
        watch_weights(metrics.registry, weights)
    context = NodeContext(
        submit_command=commands.put,
        make_transport=transport_factory(options),
        arena=arena,
        allocator=allocator,
        identity=identity,
        tokenizer=tokenizer,
        sampling_defaults=tokenizer.sampling_defaults,
        metrics=metrics,
        weights=weights,
        hooks=hooks,
        traces=TraceExporter(options.otlp, role, _instance(options), metrics.registry) if options.otlp else None,
        prefix_cache=cache,
    )
    n_default = min(tokenizer.sampling_defaults.max_tokens, plan.context - 1)
    settings = NodeSettings(
        model_name=options.served_model_name,
        max_context=plan.context,
        spec_tokens=spec_tokens,
        max_queue=options.max_queue,
        keep_rooms=options.keep_rooms,
        guard=guard or Guard(),
        deadlines=deadlines,
        facts={  # in the field names that routers ask for
            "model_path": str(options.model.resolve()),
            "tokenizer_path": str(options.model.resolve()),
            "model_type": "deepseek_v4",
            "architectures": ["DeepseekV4ForCausalLM"],
            "kernels_reason": kernels.reason,
            "kv_dtype": options.kv_dtype,
            "index_dtype": chosen_index_dtype(options.kv_dtype, options.index_dtype),
            "draft": runner.drafts,
            "checkpoint_draft": loaded.draft_of_checkpoint,
            "chat_format": chat.name,
            "can_think": chat.can_think,
            "prefix_cache": None if cache is None else _cache_facts(cache, options),
            "default_max_tokens": n_default,
            "default_max_tokens_pages": allocator.pages_for(n_default),
        },
    )
    return NodeResources(options, runner, kernels.sampler(options.threads), tokenizer, commands, context, settings)


def _prefix_cache(
    options: NodeOptions,
    identity: ModelIdentity,
    arena: Arena,
    allocator: Allocator,
    hooks: Hooks,
    drafts: bool,
    snapshot_nbytes: int,
) -> PrefixCache:
    """The cache of a node's pools. What decides about the bytes of a page or snapshot is in the root of its key."""
    layout, budget = arena.layout, options.prefix_cache
    index_dtype = chosen_index_dtype(options.kv_dtype, options.index_dtype)
    return PrefixCache(
        allocator,
        arena.owners,
        (
            identity.model,
            identity.tokenizer,
            identity.dtype,
            identity.numerics,
            identity.kernels,
            "deterministic" if identity.deterministic else "not deterministic",
            options.kv_dtype,
            index_dtype,
            "draft" if drafts else "no draft",
            str(layout.page_size),
        ),
        layout.page_size,
        snapshot_nbytes=snapshot_nbytes,
        max_pages=budget // layout.page_nbytes if isinstance(budget, int) and layout.page_nbytes else None,
        key_of=hooks.page_key,
    )


def _cache_facts(cache: PrefixCache, options: NodeOptions) -> dict[str, Any]:
    """What ``/server_info`` says of the cache: its limits, and what a hit is."""
    inexact = "the last bits may differ from those of a prompt computed whole: the node is not deterministic"
    return {
        "max_cached_pages": cache.max_pages,
        "max_snapshot_bytes": cache.snapshot_nbytes,
        "hits": "exact, bit for bit" if options.deterministic else inexact,
    }


def _instance(options: NodeOptions) -> str:
    """What tells the nodes of one role apart in traces."""
    return f"{options.host}:{options.port}"


@dataclass(frozen=True)
class _Loaded:
    """A model, the fingerprint of its files, and what kind of draft they carry."""

    model: LoadedModel
    fingerprint: str
    draft_of_checkpoint: str


def _load_model(options: NodeOptions, kernels: Kernels, budget: int | None, *, draft: bool) -> _Loaded:
    dtype, deterministic = TORCH_DTYPES[options.dtype], options.deterministic
    with reading_progress("weights") as on_progress:
        if budget is not None:
            checkpoint = map_checkpoint(
                options.model,
                budget,
                dtype=dtype,
                deterministic=deterministic,
                draft=draft,
                numerics=NUMERICS[options.numerics],
                cache_dir=default_cache_dir(),
                on_progress=on_progress,
            )
        else:
            checkpoint = load_checkpoint(
                options.model,
                dtype=dtype,
                device=options.device,
                deterministic=deterministic,
                draft=draft,
                numerics=NUMERICS[options.numerics],
                on_progress=on_progress,
            )
    loaded = _Loaded(kernels.take(checkpoint.network), checkpoint.fingerprint, checkpoint.draft)
    del checkpoint
    give_back()
    return loaded


def _load_tokenizer(model: Path, default_max_tokens: int) -> Tokenizer:
    try:
        return Tokenizer.load(model, default_max_tokens=default_max_tokens)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # the library raises many kinds; each means the same to the reader
        raise CheckpointError(f"{model}: the tokenizer cannot be loaded: {error!r}") from error


def _chat_format(tokenizer: Tokenizer, options: NodeOptions) -> ChatFormat:
    """Refuses a chat format that the checkpoint cannot have, before anything large is loaded."""
    settings = ChatSettings(options.chat_format, options.tool_parser, options.reasoning_parser)
    try:
        chat = chat_format(tokenizer, settings)
    except ChatFormatMissing as error:
        raise CheckpointError(str(error)) from error
    log.info("chat: %s", chat)
    return chat


def _free_memory(device: str) -> FreeMemory | None:
    """Of the device that weights and pools are for."""
    if device != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        return FreeMemory(free, "of the GPU")
    try:
        return free_memory()
    except OSError as error:
        log.warning("memory: this system does not say how much is free (%s)", error)
        return None


def _make_arena(plan: MemoryPlan, options: NodeOptions) -> Arena:
    layout = ArenaLayout.from_geometry(plan.geometry)
    try:
        return Arena(layout, options.device, poison=options.poison)
    except (MemoryError, RuntimeError) as error:
        raise LayoutError(
            f"{plan.pages} pages and {plan.slots} slots need {size(layout.nbytes)}: give fewer --pages or --slots "
            f"({error})"
        ) from error
