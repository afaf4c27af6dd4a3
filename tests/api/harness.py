"""What all tests of the API share: requests and their answers, clients of an app without sockets, and waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster
import httpx
from prometheus_client import CollectorRegistry

from server.api import create_app
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import FakeBackend
from tests.support import waiting
from tests.support.byte_bpe import write_tokenizer_dir

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "How many?"}]
MINIMAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "x"},
}
"""The least that each route takes."""
RESERVED = ("self", "messages", "conversation", "chat_template", "tokenize")
"""Names that the call that renders a chat template takes itself."""
JSON = {"content-type": "application/json"}
WITHIN_S = 60.0
"""Far longer than anything here takes."""


def client_of(backend: FakeBackend, registry: CollectorRegistry | None = None, **options: Any) -> httpx.AsyncClient:
    """A client of an app of its own, made with ``options``; use it in ``async with``."""
    app = create_app(backend, registry or CollectorRegistry(), **options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=WITHIN_S)


def backend_of(directory: Path, **options: Any) -> FakeBackend:
    """A backend with a tokenizer of its own; ``options`` are those of :func:`write_tokenizer_dir`."""
    return FakeBackend(Tokenizer.load(write_tokenizer_dir(directory, **options)))


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(COMPLETIONS, json={"model": "tiny", "prompt": "How many?", **body})


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(CHAT, json={"model": "tiny", "messages": HELLO, **body})


async def post(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    """Posts what ``httpx`` would not encode: NaN, and lone surrogates. ``bytes`` are sent as they are."""
    return await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), headers=JSON)


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream, parsed, ``[DONE]`` as it is."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def events(client: httpx.AsyncClient, path: str = COMPLETIONS, **body: Any) -> list[Any]:
    return events_of(await client.post(path, json={"model": "tiny", "stream": True, **body}))


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    return error


def until(condition: Callable[[], object]) -> None:
    cluster.until(condition, WITHIN_S, "what the test waits for")


async def until_async(condition: Callable[[], object]) -> None:
    await waiting.until(condition, WITHIN_S, "what the test waits for")
