"""What a node of either role is built from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.cache.allocator import Allocator
from server.cache.arena import Arena
from server.cache.prefix import PrefixCache
from server.engine.events import Command
from server.engine.request import SamplingParams, TokenizerLike
from server.faults.hooks import Hooks
from server.telemetry.traces import TraceExporter
from server.transfer.auth import Guard
from server.transfer.engines.base import TransferEngine
from server.transfer.manifest import ModelIdentity
from server.transfer.metrics import NodeMetrics
from server.transfer.rooms import Deadlines


@dataclass(frozen=True)
class NodeContext:
    """The objects that a node works with; a node builds none of them.

    ``submit_command`` is the engine's inbox. ``make_transport`` builds one transport endpoint; the node registers the
    arena with it. ``sampling_defaults`` apply where a request says nothing. Every wait of the node is
    measured by ``clock``, in seconds. ``weights`` says where the model's weights are, and what was read of them.
    ``traces`` gets the record of every request at its end, if it is to be traced. ``prefix_cache`` keeps complete
    pages, and on a prefill node snapshots; None: nothing is kept.
    """

    submit_command: Callable[[Command], None]
    make_transport: Callable[[], TransferEngine]
    arena: Arena
    allocator: Allocator
    identity: ModelIdentity
    tokenizer: TokenizerLike
    sampling_defaults: SamplingParams
    metrics: NodeMetrics
    weights: Callable[[], Mapping[str, Any]] = dict
    hooks: Hooks = field(default_factory=Hooks)
    clock: Callable[[], float] = time.monotonic
    traces: TraceExporter | None = None
    prefix_cache: PrefixCache | None = None


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """The settings of both roles. ``max_context`` is in tokens, ``spec_tokens`` in draft tokens of one step.

    ``max_queue`` is how many requests may wait for a slot and pages. ``guard`` says who may be a peer. ``keep_rooms``
    is how many records of rooms that ended are kept.

    Beside where prompts end and part, snapshots are taken every ``snapshot_every`` pages (0: only there).

    ``facts`` about the model are shown in ``/server_info``.
    """

    model_name: str
    max_context: int
    spec_tokens: int = 0
    max_queue: int = 1024
    snapshot_every: int = 8
    keep_rooms: int = 256
    guard: Guard = field(default_factory=Guard)
    facts: Mapping[str, Any] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
