"""A node of this process behind a real HTTP server in the test's own event loop, so that a test sees both the client's
side and the node's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from prometheus_client import CollectorRegistry

from server.api import create_app
from server.api.http_connections import ConnectionManager
from server.api.http_limits import HttpLimits
from server.api.http_protocol import http_config
from server.engine.request import Backend


@contextlib.asynccontextmanager
async def http_server(node: Backend, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serves ``node`` on a free loopback port; yields the base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        manager = ConnectionManager(HttpLimits(), registry)
        config = http_config(create_app(node, registry), manager, log_level="warning", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
