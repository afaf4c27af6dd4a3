"""``--api-key`` and ``--cors-origin``: who may use the API, and from which pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from tests.api.fakes import FakeBackend
from tests.api.harness import COMPLETIONS, client_of, error_of

KEY = "sk-1234567890"
BODY = {"prompt": "Hello", "max_tokens": 3}
PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.fixture
async def client(backend: FakeBackend, registry: CollectorRegistry) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend, registry, api_key=KEY) as client:
        yield client


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_the_key_opens_the_door(client: httpx.AsyncClient, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {KEY}"}
    assert (await client.post(COMPLETIONS, json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "wants an API key"),
        ("Bearer sk-1234567891", "Incorrect"),
        ("Bearer ", "Incorrect"),
        (f"Basic {KEY}", "Incorrect"),
        (KEY, "Incorrect"),
        (f"Bearer {KEY}x", "Incorrect"),
        (b"Bearer \xff\xfe", "Incorrect"),
    ],
)
async def test_without_it_the_answer_is_401_and_nothing_is_computed(
    client: httpx.AsyncClient, backend: FakeBackend, registry: CollectorRegistry, header: str | bytes | None, words: str
) -> None:
    headers = {} if header is None else {b"authorization": header if isinstance(header, bytes) else header.encode()}
    answer = await client.post(COMPLETIONS, json=BODY, headers=headers)
    error = error_of(answer, 401)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert words in error["message"]
    assert answer.headers["www-authenticate"] == "Bearer"
    assert backend.requests == []
    assert registry.get_sample_value("pd_http_responses_total", {"route": "other", "status": "401"}) == 1


async def test_probes_and_metrics_are_open_and_nothing_else(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert (await client.get(path)).status_code == 200
    for path in ("/v1/models", "/server_info", "/model_info", "/openapi.json", "/docs", "/nowhere"):
        error_of(await client.get(path), 401)


async def test_a_body_too_large_is_not_read_for_a_stranger(client: httpx.AsyncClient) -> None:
    error_of(await client.post(COMPLETIONS, content=b"x" * (9 << 20)), 401)


async def test_the_openai_client_sends_it(client: httpx.AsyncClient) -> None:
    http_client: Any = client  # the package is written for a copy of httpx
    asking = openai.AsyncOpenAI(base_url="http://test/v1", api_key=KEY, http_client=http_client)
    assert (await asking.completions.create(model="tiny", prompt="Hello", max_tokens=3)).choices
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        await asking.with_options(api_key="sk-wrong-wrong").models.list()


@pytest.mark.parametrize("origin", [PAGE, "*"])
async def test_a_browser_may_use_it_from_a_page_that_is_named(backend: FakeBackend, origin: str) -> None:
    async with client_of(backend, api_key=KEY, cors_origins=[origin]) as client:
        answer = await client.options(COMPLETIONS, headers=PREFLIGHT)  # browsers send no key with it
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        for key, status in [(KEY, 200), ("wrong", 401)]:
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
async def test_from_no_other(backend: FakeBackend, origins: tuple[str, ...]) -> None:
    async with client_of(backend, api_key=KEY, cors_origins=origins) as client:
        answer = await client.options(COMPLETIONS, headers=PREFLIGHT)
        assert answer.status_code in (400, 401)
        assert "access-control-allow-origin" not in answer.headers
