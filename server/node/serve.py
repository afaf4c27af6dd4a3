"""Runs one node that is loaded: its engine thread, HTTP server and signals, to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn

from server import __version__
from server.api import create_app
from server.api.http_connections import ConnectionManager, allow_open_files
from server.api.http_limits import HttpLimits
from server.api.http_protocol import http_config
from server.chat.registry import ChatSettings
from server.engine.engine import Engine
from server.node.base import BaseNode
from server.node.options import NodeOptions
from server.node.ports import url_of
from server.node.run import END_SIGNALS
from server.threads import call_in_thread

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_DEAD_S = 1.0
"""How long ``/health`` still reports that the node has died before the process ends."""
_SHUTDOWN_S = 5
"""How long answers that are over may take to reach their clients."""


async def serve(
    node: BaseNode, engine: Engine, options: NodeOptions, listener: socket.socket, *, api_key: str | None
) -> int:
    """Runs a node until SIGINT, SIGTERM or SIGHUP; the process's exit code: 0, or 1 if a vital part of it died.

    The first signal lets what is under way come to its end, for up to ``drain_timeout_s``; a second one ends it at
    once. ``listener`` is the HTTP port. What is raised was raised before the node served.
    """
    server, signals = _Server(_http_config(node, options, api_key)), _Signals()
    async with _running(node, engine):
        # What is loaded stays: a full collection, which any large request brings on, would hold the event loop for a
        # quarter of a second to look at it all again.
        gc.freeze()
        gc.enable()
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        await _until(lambda: server.started or serving.done())
        if server.started:
            log.info("%s node serves %s", node.role, url_of(listener))
        await _until(lambda: signals.n_seen > 0 or serving.done() or not node.alive()[0])
        if signals.n_seen:
            await _drain(node, signals, options.drain_timeout_s)
    is_alive, reason = node.alive()
    if not is_alive:
        log.error("stopping: %s", reason)
        await asyncio.wait({serving}, timeout=_DEAD_S)
    server.should_exit, server.force_exit = True, signals.n_seen > 1
    try:
        await serving
    except Exception:
        log.exception("the HTTP server ended by an exception")
        return 1
    return 0 if is_alive and signals.n_seen else 1


def _http_config(node: BaseNode, options: NodeOptions, api_key: str | None) -> uvicorn.Config:
    limits = HttpLimits(max_connections=options.max_connections, keep_alive_s=options.keep_alive_s)
    allow_open_files(options.max_connections)
    registry = node.metrics.registry
    app = create_app(
        node,
        registry,
        version=__version__,
        api_key=api_key,
        cors_origins=options.cors_origins,
        chat_settings=ChatSettings(options.chat_format, options.tool_parser, options.reasoning_parser),
    )
    return http_config(
        app,
        ConnectionManager(limits, registry),
        log_config=None,
        access_log=options.log_level == "debug",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


class _Signals:
    """Counts the signals that ask for the end, in place of their usual effect. One that was ignored when the process
    began stays so: ``nohup`` means it.
    """

    def __init__(self) -> None:
        self.n_seen = 0
        for number in END_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._count)

    def _count(self) -> None:
        self.n_seen += 1


class _Server(uvicorn.Server):
    """Leaves signals to :class:`_Signals`: uvicorn would raise them once more after a clean end, and the exit code be
    -15.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _running(node: BaseNode, engine: Engine) -> AsyncIterator[None]:
    engine.start()
    try:
        await node.start()
        node.vital(engine)
        yield
    finally:
        await node.stop()
        await call_in_thread("stop engine", engine.stop)


async def _drain(node: BaseNode, signals: _Signals, timeout_s: float) -> None:
    log.info("ending: up to %g s for what is under way; a second signal ends at once", timeout_s)
    node.drain()
    await _until(lambda: not node.busy or signals.n_seen > 1 or not node.alive()[0], timeout_s)


async def _until(condition: Callable[[], bool], timeout_s: float = math.inf) -> None:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:  # noqa: ASYNC110  (none of this has an event, and a look is cheap)
        await asyncio.sleep(_LOOK_S)
