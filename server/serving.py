"""Runs one node: engine thread, HTTP server, signals, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import uvicorn

from server import __version__
from server.api import create_app
from server.engine.engine import Engine
from server.engine.events import Event
from server.engine.request import Backend
from server.launch import Groundwork

log = logging.getLogger(__name__)

DRAIN_S = 3.0
"""How long running requests may go on after the process was told to end. Then the node fails them with their reason,
before uvicorn cuts their connections.
"""


class Node(Backend, Protocol):
    """What a launcher needs of a node beside the HTTP backend."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def on_engine_event(self, event: Event) -> None: ...


async def serve(node: Node, ground: Groundwork, *, spec_tokens: int = 0, cold_draft: bool = False) -> int:
    """Runs a node until SIGINT or SIGTERM; the process's exit code: 0, or 1 if the engine thread died.

    The engine drafts ``spec_tokens`` a step.
    """
    options = ground.options
    engine = Engine(
        ground.runner,
        ground.tokenizer,
        node.on_engine_event,
        chunk_tokens=options.chunk_tokens,
        threads=options.threads,
        spec_tokens=spec_tokens,
        cold_draft=cold_draft,
    )
    ground.inbox.attach(engine)
    listener = _listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        create_app(node, ground.parts.metrics.registry, version=__version__),
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
