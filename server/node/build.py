"""Builds everything below a node from its options: model, pools, engine thread, transport; and tells start-up errors.

How a node then runs is in :mod:`server.node.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvloop
from prometheus_client import CollectorRegistry
from transformers.utils import logging as transformers_log

from server.cache.allocator import Allocator
from server.cache.arena import TORCH_DTYPES, Arena
from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry, LayoutError
from server.engine.engine import Engine
from server.engine.events import Command
from server.engine.runner import ModelRunner
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.faults.spec import FaultError, FaultSet
from server.model.config import CheckpointError
from server.model.loader import load_model, model_fingerprint
from server.model.state import state_components
from server.node.context import NodeContext
from server.node.logs import open_standard_streams, process_log
from server.node.options import NodeOptions, Security
from server.node.ports import PortError
from server.transfer.addresses import is_ipv6, split_address
from server.transfer.auth import AuthError, Guard, read_secret
from server.transfer.deadlines import DeadlineError, parse_deadlines
from server.transfer.engines.base import TransferEngine, TransferError, TransportMisconfigured
from server.transfer.engines.mooncake import MooncakeEngine
from server.transfer.manifest import ModelIdentity, TransportIdentity
from server.transfer.metrics import NodeMetrics
from server.transfer.rooms import Deadlines

log = logging.getLogger(__name__)

STARTUP_ERRORS = (
    AuthError,
    CheckpointError,
    LayoutError,
    PortError,
    TransferError,
    FaultError,
    DeadlineError,
    RequestFailed,
    OSError,
)
"""What a wrong option, checkpoint or port raises, in words that need no addition."""

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They ask a node to end. The last one comes when its terminal is closed."""

MIN_API_KEY_CHARS = 8
MAX_SENTENCE_CHARS = 1000
_WILDCARDS = ("0.0.0.0", "::", "")


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


@dataclass(frozen=True)
class Keys:
    """Who may use the node: ``api_key`` is what clients need, if any; ``guard`` is the rule for peers."""

    api_key: str | None = None
    guard: Guard = field(default_factory=Guard)


def read_keys(security: Security) -> Keys:
    """What the options and the files that they name say. Raises :class:`AuthError` for what protects nothing."""
    api_key = security.api_key
    if security.api_key_file is not None:
        api_key = read_secret(security.api_key_file, min_chars=MIN_API_KEY_CHARS)
    if api_key is not None and len(api_key) < MIN_API_KEY_CHARS:
        raise AuthError(f"--api-key has {len(api_key)} characters, at least {MIN_API_KEY_CHARS} are needed")
    return Keys(api_key, Guard.from_options(security.auth_key_file, insecure=security.insecure))


@dataclass(frozen=True)
class Groundwork:
    """Everything below the node, built from the options. ``spec_tokens`` is what the pools' rings can undo."""

    options: NodeOptions
    keys: Keys
    runner: ModelRunner
    tokenizer: Tokenizer
    inbox: EngineInbox
    parts: NodeContext
    deadlines: Deadlines
    max_context: int
    spec_tokens: int

    def settings(self) -> dict[str, Any]:
        """The fields of :class:`NodeSettings` that follow from the options and the model."""
        return {
            "model_name": self.options.served_model_name,
            "max_context": self.max_context,
            "spec_tokens": self.spec_tokens,
            "max_queue": self.options.limits.max_queue,
            "guard": self.keys.guard,
            "deadlines": self.deadlines,
            "facts": self._model_facts(),
        }

    def _model_facts(self) -> dict[str, Any]:
        """What ``/server_info`` and ``/model_info`` say of the model, in the field names that routers ask for."""
        n_default = min(self.tokenizer.sampling_defaults.max_tokens, self.max_context - 1)
        return {
            "model_path": str(self.options.model.resolve()),
            "tokenizer_path": str(self.options.model.resolve()),
            "model_type": "deepseek_v4",
            "architectures": ["DeepseekV4ForCausalLM"],
            "draft": self.runner.drafts,
            "default_max_tokens": n_default,
            "default_max_tokens_pages": self.parts.allocator.pages_for(n_default),
        }


def lay_groundwork(
    role: str, options: NodeOptions, keys: Keys | None = None, *, draft: bool = False, spec_tokens: int = 0
) -> Groundwork:
    """What a ``prefill`` or ``decode`` node (``role``) stands on: loads the checkpoint, with its draft layer if
    ``draft``, and lays out the pools for ``spec_tokens`` draft tokens a step.

    Raises one of :data:`STARTUP_ERRORS`.
    """
    faults, deadlines = FaultSet.parse(options.faults, role), parse_deadlines(options.limits.deadlines)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("--device cuda: torch sees no CUDA device")
    dtype = TORCH_DTYPES[options.dtype]
    tokenizer = _load_tokenizer(options.model, options.limits.default_max_tokens)
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
    arena = _make_arena(geometry, options)
    allocator = Allocator(geometry, permute_seed=options.permute_ids)
    # a request also needs room for the tokens drafted behind its last one
    max_context = min(model.config.max_position_embeddings, allocator.capacity_tokens - spec_tokens)
    log.info(
        "%s: %d state components in an arena of %.1f MiB, context %d tokens",
        options.served_model_name,
        len(geometry.components),
        arena.nbytes / 2**20,
        max_context,
    )
    inbox = EngineInbox()
    parts = NodeContext(
        submit_command=inbox.submit,
        make_transport=_transport_factory(options),
        arena=arena,
        allocator=allocator,
        identity=ModelIdentity(model_fingerprint(options.model), tokenizer.fingerprint, options.dtype),
        tokenizer=tokenizer,
        sampling_defaults=tokenizer.sampling_defaults,
        metrics=NodeMetrics(CollectorRegistry()),
        faults=faults,
    )
    runner = ModelRunner(model, arena)
    return Groundwork(options, keys or Keys(), runner, tokenizer, inbox, parts, deadlines, max_context, spec_tokens)


def _load_tokenizer(model: Path, default_max_tokens: int) -> Tokenizer:
    try:
        return Tokenizer.load(model, default_max_tokens=default_max_tokens)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # the library raises many kinds; each means the same to the reader
        raise CheckpointError(f"{model}: the tokenizer cannot be loaded: {error!r}") from error


def _make_arena(geometry: CacheGeometry, options: NodeOptions) -> Arena:
    layout = ArenaLayout.from_geometry(geometry)
    try:
        return Arena(layout, options.device, poison=options.poison)
    except (MemoryError, RuntimeError) as error:
        raise LayoutError(
            f"{options.pages} pages and {options.slots} slots need {layout.nbytes / 2**30:.1f} GiB: give fewer "
            f"--pages or --slots ({error})"
        ) from error


def _transport_factory(options: NodeOptions) -> Callable[[], TransferEngine]:
    """Builds Mooncake endpoints that peers reach at this node's transfer host."""
    kind = "tcp" if options.transport == "tcp" else "auto"
    return lambda: MooncakeEngine(options.transfer_host, transport=kind)  # type: ignore[arg-type]


def check_model(model: Path) -> None:
    """Refuses, before anything else is read, a ``--model`` that is no directory. Raises :class:`CheckpointError`."""
    if not model.exists():
        raise CheckpointError(
            f"--model {model}: there is no such directory (a checkpoint is read from this machine, not from a hub)"
        )
    if not model.is_dir():
        raise CheckpointError(f"--model {model} is a file: give the directory of a checkpoint")


def prove_transport(options: NodeOptions) -> TransportIdentity:
    """Before anything is loaded: what the transport says of itself. Raises :class:`TransferError`."""
    return TransportIdentity.of_new(_transport_factory(options))


def check_transfer_host(options: NodeOptions) -> None:
    """Refuses a wildcard address, which says where to listen but not where to be found, and a name of nobody.

    Raises :class:`TransportMisconfigured`.
    """
    host = options.transfer_host
    if host in _WILDCARDS:
        raise TransportMisconfigured(f"no peer can write to {host}: give --transfer-host the address of this node")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        option = "--host" if host == options.host else "--transfer-host"
        raise TransportMisconfigured(f"{option} {host}: no such host ({error})") from error


class _EndedEarly(BaseException):
    """A signal asked for the end before the node served."""


def check_families(options: NodeOptions, peers: Sequence[str]) -> None:
    """Mooncake speaks IPv4 or IPv6, not both: a pair's addresses must be of one kind. Names stand for IPv4 addresses.

    Raises :class:`TransportMisconfigured`.
    """
    for peer in peers:
        if is_ipv6(split_address(peer)[0]) != is_ipv6(options.transfer_host):
            raise TransportMisconfigured(
                f"prefill {peer} and this node's own {options.transfer_host} (--host or --transfer-host) are an IPv4 "
                "and an IPv6 address: Mooncake speaks one of the two, so give both nodes addresses of the same kind"
            )


def run(prog: str, options: NodeOptions, start: Callable[[], Awaitable[int]]) -> int:
    """Runs ``start`` with the log of a process. What it raises is a start-up error: one sentence on standard error and
    exit code 2.
    """
    open_standard_streams()
    with process_log(options.log_level):
        transformers_log.disable_default_handler()  # it writes in a format of its own
        transformers_log.enable_propagation()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            with _signals_end_at_once(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_awaited(start))
        except _EndedEarly:
            log.info("told to end before it served")
            return 0
        except Exception as error:
            log.debug("the node could not start", exc_info=True)
            sentence = _one_sentence(error)
    with contextlib.suppress(OSError):
        print(f"{prog}: {sentence}", file=sys.stderr)  # noqa: T201  (the command line's own words)
    return 2


def _one_sentence(error: Exception) -> str:
    words = " ".join(str(error).split())[:MAX_SENTENCE_CHARS]
    if isinstance(error, STARTUP_ERRORS):
        return words
    return f"could not start: {type(error).__name__}: {words} (--log-level debug shows where)"


@contextlib.contextmanager
def _signals_end_at_once() -> Iterator[None]:
    """Until the node serves, and has signal handlers of its own, there is nothing to bring to an end."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _EndedEarly

    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _awaited(start: Callable[[], Awaitable[int]]) -> int:
    return await start()
