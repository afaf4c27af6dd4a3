from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from server.api import create_app
from server.api.streaming import StreamTimes
from server.engine.tokenizer import Tokenizer
from tests.api.deepseek import deepseek_backend
from tests.api.fakes import FakeBackend
from tests.support.byte_bpe import write_tokenizer_dir
from tests.support.http import http_server_thread


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer_dir(tmp_path_factory.mktemp("bpe")))


@pytest.fixture
def backend(tokenizer: Tokenizer) -> FakeBackend:
    return FakeBackend(tokenizer)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.fixture
def deepseek(directory: Path) -> FakeBackend:
    """For tests that serve it, a file's ``backend`` is this one."""
    return deepseek_backend(directory)


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


@pytest.fixture
def server_url(app: FastAPI, registry: CollectorRegistry) -> Iterator[str]:
    with http_server_thread(app, registry) as url:
        yield url
