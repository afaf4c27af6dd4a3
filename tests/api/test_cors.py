"""``--cors-origin``: browsers may use the API from other pages, if it was asked for."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry

from server.api import create_app
from tests.api.fakes import FakeBackend

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
KEY = "sk-1234567890"


def client_of(backend: FakeBackend, *origins: str) -> httpx.AsyncClient:
    app = create_app(backend, CollectorRegistry(), api_key=KEY, cors_origins=origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("origin", [PAGE, "*"])
async def test_a_browser_may_use_it_from_a_page_that_is_named(backend: FakeBackend, origin: str) -> None:
    async with client_of(backend, origin) as client:
        answer = await client.options("/v1/completions", headers=PREFLIGHT)  # browsers send no key with it
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        for key, status in [(KEY, 200), ("wrong", 401)]:
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
async def test_from_no_other(backend: FakeBackend, origins: tuple[str, ...]) -> None:
    async with client_of(backend, *origins) as client:
        answer = await client.options("/v1/completions", headers=PREFLIGHT)
        assert answer.status_code in (400, 401)
        assert "access-control-allow-origin" not in answer.headers
