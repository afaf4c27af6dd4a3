"""A backend behind the real HTTP server on a loopback port: in the test's own event loop, or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from server.api import create_app
from server.api.http_connections import ConnectionManager
from server.api.http_limits import HttpLimits
from server.api.http_protocol import http_config
from server.engine.request import Backend


@contextlib.asynccontextmanager
async def http_server(node: Backend, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serves ``node`` in this event loop, so that a test sees both the client's side and the node's; yields the URL."""
    with _listening() as listener:
        server = _server(create_app(node, registry), registry, HttpLimits())
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        try:
            yield _url(listener)
        finally:
            server.should_exit = True
            await serving


@contextlib.contextmanager
def http_server_thread(app: ASGIApp, registry: CollectorRegistry, limits: HttpLimits | None = None) -> Iterator[str]:
    """Serves ``app`` in a thread of its own, as the nodes run it; yields the URL."""
    with _listening() as listener:
        server = _server(app, registry, limits or HttpLimits())

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve([listener]))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.01)
        yield _url(listener)
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def _listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _server(app: ASGIApp, registry: CollectorRegistry, limits: HttpLimits) -> uvicorn.Server:
    manager = ConnectionManager(limits, registry)
    return uvicorn.Server(http_config(app, manager, log_level="warning", timeout_graceful_shutdown=2))
