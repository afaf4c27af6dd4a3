"""``--api-key``: everything but probes and metrics needs the key, and says so in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from server.api import create_app
from tests.api.fakes import FakeBackend
from tests.api.test_errors import error_of

KEY = "sk-1234567890"
BODY = {"prompt": "Hello", "max_tokens": 3}


@pytest.fixture
async def client(backend: FakeBackend, registry: CollectorRegistry) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, registry, api_key=KEY))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_the_key_opens_the_door(client: httpx.AsyncClient, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {KEY}"}
    assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


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
    answer = await client.post(
        "/v1/completions", json=BODY, headers=None if header is None else {"authorization": header}
    )
    error = error_of(answer, 401)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert words in error["message"]
    assert answer.headers["www-authenticate"] == "Bearer"
    assert backend.requests == []
    assert registry.get_sample_value("pd_http_responses_total", {"route": "other", "status": "401"}) == 1


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/model_info", "/openapi.json", "/docs", "/nowhere"])
async def test_what_tells_of_the_model_needs_it_too(client: httpx.AsyncClient, path: str) -> None:
    error_of(await client.get(path), 401)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_and_metrics_are_open(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


async def test_a_body_too_large_is_not_read_for_a_stranger(client: httpx.AsyncClient) -> None:
    error_of(await client.post("/v1/completions", content=b"x" * (9 << 20)), 401)


async def test_the_openai_client_sends_it(client: httpx.AsyncClient) -> None:
    asking = openai.AsyncOpenAI(base_url="http://test/v1", api_key=KEY, http_client=client)
    assert (await asking.completions.create(model="tiny", prompt="Hello", max_tokens=3)).choices
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        await asking.with_options(api_key="sk-wrong-wrong").models.list()
