"""The routes of the records: their answers, their limits, and the key."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.api.fakes import KEPT_ROOM, FakeBackend
from tests.api.harness import client_of, complete, error_of

KEY = "sk-a-secret"


async def test_rooms_are_listed_within_a_limit(client: httpx.AsyncClient) -> None:
    assert (await client.get("/rooms")).json() == {"node": "decode", "limit": 64}
    assert (await client.get("/rooms?limit=3")).json()["limit"] == 3
    for wrong in ("0", "257", "many"):
        assert error_of(await client.get(f"/rooms?limit={wrong}"), 400)["param"] == "limit"


async def test_an_id_beyond_what_a_json_number_keeps_is_found(client: httpx.AsyncClient) -> None:
    assert (await client.get(f"/rooms/{KEPT_ROOM}")).json() == {"room": str(KEPT_ROOM)}
    assert error_of(await client.get("/rooms/17"), 404)["code"] == "room_not_found"
    for wrong in ("-1", "1.5", "9" * 20, "x"):
        assert error_of(await client.get(f"/rooms/{wrong}"), 400)["param"] == "room"


@pytest.mark.parametrize("path", ["/rooms", f"/rooms/{KEPT_ROOM}", "/state"])
async def test_they_need_the_key(backend: FakeBackend, path: str) -> None:
    async with client_of(backend, CollectorRegistry(), api_key=KEY) as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers={"authorization": f"Bearer {KEY}"})).is_success


async def test_a_request_knows_when_it_came_and_who_traces_it(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    client.headers["traceparent"] = caller
    await complete(client, n=2)
    assert {request.traceparent for request in backend.requests} == {caller}
    (arrived_at,) = {request.arrived_at for request in backend.requests}
    assert arrived_at is not None
    del client.headers["traceparent"]
    await complete(client)
    assert backend.requests[-1].traceparent is None
    assert (backend.requests[-1].arrived_at or 0) > arrived_at
