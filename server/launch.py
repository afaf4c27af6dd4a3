"""Builds one node's parts from its options and runs it: model, pools, engine thread, HTTP server, clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from server import __version__
from server.api import create_app
from server.cache.allocator import Allocator
from server.cache.arena import TORCH_DTYPES, Arena
from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry, LayoutError
from server.engine.engine import Engine
from server.engine.events import Command, Event
from server.engine.request import Backend, RequestFailed
from server.engine.runner import ModelRunner
from server.engine.tokenizer import Tokenizer
from server.model.config import CheckpointError
from server.model.loader import load_model, model_fingerprint
from server.model.state import state_components
from server.options import NodeOptions
from server.transfer.engines.base import TransferEngine, TransferError, TransportMisconfigured
from server.transfer.engines.mooncake import MooncakeEngine
from server.transfer.faults import FaultError
from server.transfer.manifest import ModelIdentity

log = logging.getLogger(__name__)

STARTUP_ERRORS = (CheckpointError, LayoutError, TransferError, FaultError, RequestFailed, OSError)
"""What a wrong option, checkpoint or port raises: told in one sentence, without a traceback."""


_WILDCARDS = ("0.0.0.0", "::", "")


DRAIN_S = 3.0
"""How long running requests may go on after the process was told to end. Then the node fails them with their reason,
before uvicorn cuts their connections.
"""


class Node(Backend, Protocol):
    """What a launcher needs of a node beside the HTTP backend."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def on_engine_event(self, event: Event) -> None: ...


@dataclass(frozen=True)
class Parts:
    """Everything below the node, built from the options."""

    runner: ModelRunner
    allocator: Allocator
    tokenizer: Tokenizer
    identity: ModelIdentity
    max_context: int

    @property
    def arena(self) -> Arena:
        return self.runner.arena


def build_parts(options: NodeOptions, *, draft: bool = False, spec_tokens: int = 0) -> Parts:
    """Loads the checkpoint, with its draft layer if ``draft``, and lays out the pools for ``spec_tokens`` draft tokens
    a step.

    Raises one of :data:`STARTUP_ERRORS`.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("--device cuda: torch sees no CUDA device")
    dtype = TORCH_DTYPES[options.dtype]
    model = load_model(
        options.model, dtype=dtype, device=options.device, deterministic=options.deterministic, draft=draft
    )
    geometry = CacheGeometry(
        page_size=options.page_size,
        pages=options.pages + 1,  # item 0 is never handed out
        slots=options.slots + 1,
        window=model.config.sliding_window,
        spec_tokens=spec_tokens,
        components=state_components(model.config, options.dtype, spec_tokens, draft=draft),
    )
    arena = Arena(ArenaLayout.from_geometry(geometry), options.device, poison=options.poison)
    allocator = Allocator(geometry, permute_seed=options.permute_ids)
    tokenizer = Tokenizer.load(options.model)
    identity = ModelIdentity(model_fingerprint(options.model), tokenizer.fingerprint, options.dtype)
    max_context = min(model.config.max_position_embeddings, allocator.capacity_tokens)
    log.info(
        "%s: %d state components in an arena of %.1f MiB, context %d tokens",
        options.served_model_name,
        len(geometry.components),
        arena.nbytes / 2**20,
        max_context,
    )
    return Parts(ModelRunner(model, arena), allocator, tokenizer, identity, max_context)


def model_facts(options: NodeOptions, parts: Parts) -> dict[str, Any]:
    """What ``/server_info`` and ``/model_info`` say of the model, in the field names that routers ask for."""
    return {
        "model_path": str(options.model.resolve()),
        "tokenizer_path": str(options.model.resolve()),
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "draft": parts.runner.drafts,
    }


def transport_factory(options: NodeOptions) -> Callable[[], TransferEngine]:
    """Builds Mooncake endpoints that peers reach at this node's transfer host."""
    kind = "tcp" if options.transport == "tcp" else "auto"
    return lambda: MooncakeEngine(options.transfer_host, transport=kind)  # type: ignore[arg-type]


def check_transfer_host(options: NodeOptions) -> None:
    """Refuses a wildcard address, which says where to listen but not where to be found.

    Raises :class:`TransportMisconfigured`.
    """
    host = options.transfer_host
    if host in _WILDCARDS:
        raise TransportMisconfigured(f"no peer can write to {host}: give --transfer-host the address of this node")


class EngineInbox:
    """Lets a node be built before its engine: commands go to the engine that is attached later."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, command: Command) -> None:
        if self._engine is None:
            raise RuntimeError("the engine is not attached yet")
        self._engine.submit(command)


async def serve(
    node: Node,
    inbox: EngineInbox,
    parts: Parts,
    options: NodeOptions,
    registry: CollectorRegistry,
    *,
    spec_tokens: int = 0,
    cold_draft: bool = False,
) -> int:
    """Runs a node until SIGINT or SIGTERM; the process's exit code: 0, or 1 if the engine thread died."""
    engine = Engine(
        parts.runner,
        parts.tokenizer,
        node.on_engine_event,
        chunk_tokens=options.chunk_tokens,
        threads=options.threads,
        spec_tokens=spec_tokens,
        cold_draft=cold_draft,
    )
    inbox.attach(engine)
    listener = _listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        create_app(node, registry, version=__version__),
        log_level=options.log_level,
        access_log=options.log_level == "debug",
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    async with _running(node, engine):
        log.info("%s node serves http://%s:%d", node.role, host, port)
        watcher = asyncio.create_task(_stop_when_dead(node, server))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.should_exit and not serving.done():  # noqa: ASYNC110  (uvicorn has no event for this)
            await asyncio.sleep(0.1)
        await asyncio.wait({serving}, timeout=DRAIN_S)
        await node.stop()
        await serving
        watcher.cancel()
        return 0 if node.alive()[0] else 1


class _Server(uvicorn.Server):
    """Leaves signals to :func:`serve`: uvicorn would raise them once more after a clean end, and the exit code be
    -15.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Ends gracefully; the second time at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


@contextlib.asynccontextmanager
async def _running(node: Node, engine: Engine) -> AsyncIterator[None]:
    engine.start()
    try:
        await node.start()
        yield
    finally:
        await node.stop()
        await asyncio.to_thread(engine.stop)


async def _stop_when_dead(node: Node, server: uvicorn.Server) -> None:
    while node.alive()[0]:  # noqa: ASYNC110  (a node has no event for this, and a look costs nothing)
        await asyncio.sleep(0.2)
    log.error("stopping: %s", node.alive()[1])
    server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


def run(prog: str, options: NodeOptions, start: Callable[[], Awaitable[int]]) -> int:
    """Sets up logging, runs ``start`` and tells start-up errors in one sentence on stderr (exit code 2)."""
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_awaited(start))
    except STARTUP_ERRORS as error:
        print(f"{prog}: {error}", file=sys.stderr)  # noqa: T201  (the command line's own words)
        return 2


async def _awaited(start: Callable[[], Awaitable[int]]) -> int:
    return await start()
