from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from server.api import create_app
from server.api.http_connections import ConnectionManager
from server.api.http_limits import HttpLimits
from server.api.http_protocol import http_config
from server.api.streaming import StreamTimes
from server.engine.tokenizer import Tokenizer
from tests.api.byte_bpe import write_tokenizer_dir
from tests.api.fakes import FakeBackend


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer_dir(tmp_path_factory.mktemp("bpe")))


@pytest.fixture
def backend(tokenizer: Tokenizer) -> FakeBackend:
    return FakeBackend(tokenizer)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def stream_times() -> StreamTimes:
    return StreamTimes()


@pytest.fixture
def app(backend: FakeBackend, registry: CollectorRegistry, stream_times: StreamTimes) -> FastAPI:
    return create_app(backend, registry, stream_times=stream_times)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@contextlib.contextmanager
def serving(app: FastAPI, registry: CollectorRegistry, limits: HttpLimits | None = None) -> Iterator[str]:
    """The app behind the real HTTP server on a loopback port, in a thread of its own, as the nodes run it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        manager = ConnectionManager(limits or HttpLimits(), registry)
        server = uvicorn.Server(http_config(app, manager, log_level="warning", timeout_graceful_shutdown=2))

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve([listener]))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def server_url(app: FastAPI, registry: CollectorRegistry) -> Iterator[str]:
    with serving(app, registry) as url:
        yield url
