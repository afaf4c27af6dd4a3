"""Requests whose room a router names, on both roles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from server.engine.request import RoutedRoom
from server.engine.tokenizer import Tokenizer
from server.failure import Failure, RequestFailed
from tests.api.fakes import FakeBackend
from tests.api.harness import MINIMAL, chat, client_of, complete, error_of

MAX_ROOM = 2**63 - 1
NAMED = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": MAX_ROOM}


@pytest.fixture
def prefill(tokenizer: Tokenizer) -> FakeBackend:
    return FakeBackend(tokenizer, role="prefill")


@pytest.fixture
async def at_prefill(prefill: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(prefill) as client:
        yield client


@pytest.mark.parametrize("room", [0, 1, 2**53 + 1, MAX_ROOM])
async def test_a_room_keeps_its_exact_value(client: httpx.AsyncClient, backend: FakeBackend, room: int) -> None:
    for answer in (
        await complete(client, **NAMED | {"bootstrap_room": room}),
        await chat(client, **NAMED | {"bootstrap_room": room}),
    ):
        assert answer.status_code == 200, answer.text
    assert [request.routed for request in backend.requests] == [RoutedRoom(room, "10.0.0.1", 8998)] * 2


async def test_without_the_fields_no_room_is_named(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    nothing = dict.fromkeys(NAMED)
    assert (await complete(client, **nothing)).status_code == 200
    assert backend.requests[0].routed is None


async def test_each_sample_of_each_prompt_has_its_own_room(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    lists = {"bootstrap_host": ["a"] * 4, "bootstrap_port": [1, 2, 3, 4], "bootstrap_room": [9, 8, 7, 6]}
    assert (await complete(client, prompt=["x", "y"], n=2, **lists)).status_code == 200
    named = [request.routed for request in backend.requests]
    assert named == [RoutedRoom(9, "a", 1), RoutedRoom(8, "a", 2), RoutedRoom(7, "a", 3), RoutedRoom(6, "a", 4)]


async def test_one_host_and_port_hold_for_all_rooms(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await complete(client, n=2, **NAMED | {"bootstrap_room": [1, 2]})).status_code == 200
    assert [request.routed for request in backend.requests] == [RoutedRoom(i, "10.0.0.1", 8998) for i in (1, 2)]


async def test_a_list_of_one_is_one(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    one = {name: [value] for name, value in NAMED.items()}
    assert (await complete(client, prompt=["x"], **one)).status_code == 200
    assert backend.requests[0].routed == RoutedRoom(MAX_ROOM, "10.0.0.1", 8998)


WRONG = [
    ("bootstrap_room", -1),
    ("bootstrap_room", MAX_ROOM + 1),
    ("bootstrap_room", 10**400),
    ("bootstrap_room", "17"),
    ("bootstrap_room", 17.0),
    ("bootstrap_room", True),
    ("bootstrap_room", {}),
    ("bootstrap_room", []),
    ("bootstrap_room", [1, 2]),
    ("bootstrap_room", [1.0]),
    ("bootstrap_room", [None]),
    ("bootstrap_room", [[1]]),
    ("bootstrap_room", list(range(257))),
    ("bootstrap_port", 0),
    ("bootstrap_port", 65536),
    ("bootstrap_port", "8998"),
    ("bootstrap_port", True),
    ("bootstrap_port", [8998, 8998]),
    ("bootstrap_port", None),
    ("bootstrap_host", ""),
    ("bootstrap_host", 5),
    ("bootstrap_host", "a\nb"),
    ("bootstrap_host", "a" * 256),
    ("bootstrap_host", ["a", "b"]),
    ("bootstrap_host", None),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:20])
async def test_a_wrong_field_is_a_400_by_its_name(
    client: httpx.AsyncClient, backend: FakeBackend, field: str, value: Any
) -> None:
    error = error_of(await complete(client, **NAMED | {field: value}), 400)
    assert error["param"] == field
    assert not backend.requests


@pytest.mark.parametrize("rooms", [5, [5], [5, 6, 7], [4, 4, 5, 6], [4, 4]])
async def test_rooms_must_be_one_for_each_prompt_or_sample(
    client: httpx.AsyncClient, backend: FakeBackend, rooms: Any
) -> None:
    error = error_of(await complete(client, prompt=["x", "y"], n=2, **NAMED | {"bootstrap_room": rooms}), 400)
    assert error["param"] == "bootstrap_room"
    assert not backend.requests


async def test_samples_that_share_a_room_get_one_each_and_both_nodes_the_same(
    client: httpx.AsyncClient, at_prefill: httpx.AsyncClient, backend: FakeBackend, prefill: FakeBackend
) -> None:
    for fields in (
        {"n": 128, "bootstrap_room": 5},
        {"n": 2, "bootstrap_room": [MAX_ROOM]},
        {"n": 3, "prompt": ["x", "y"], "bootstrap_room": [1, 2], "bootstrap_host": ["a", "b"]},
    ):
        for node, nodes_backend in ((client, backend), (at_prefill, prefill)):
            nodes_backend.generations.clear()
            assert (await complete(node, **NAMED | fields)).status_code == 200
        named = [request.routed for request in backend.requests]
        assert named == [request.routed for request in prefill.requests]
        rooms = [one.room for one in named if one is not None]
        assert len(set(rooms)) == len(named)
        assert all(0 <= room <= MAX_ROOM for room in rooms)
        assert rooms[0] in (5, MAX_ROOM, 1)
    assert [one.host for one in named if one is not None] == ["a"] * 3 + ["b"] * 3
    assert rooms[3] == 2


async def test_a_host_without_a_room_is_a_400(client: httpx.AsyncClient) -> None:
    error = error_of(await complete(client, bootstrap_host="a", bootstrap_port=1), 400)
    assert error["param"] == "bootstrap_room"


@pytest.mark.parametrize("path", MINIMAL)
async def test_a_prefill_node_refuses_what_names_no_room(
    at_prefill: httpx.AsyncClient, prefill: FakeBackend, path: str
) -> None:
    error = error_of(await at_prefill.post(path, json=MINIMAL[path]), 400)
    assert (error["param"], error["code"]) == ("bootstrap_room", "wrong_role")
    assert "decode node" in error["message"]
    assert not prefill.requests


async def test_a_prefill_node_needs_the_room_only_and_generates_one_token(
    at_prefill: httpx.AsyncClient, prefill: FakeBackend
) -> None:
    answer = await complete(at_prefill, bootstrap_room=7, max_tokens=100_000, min_tokens=9)
    assert answer.status_code == 200, answer.text
    assert prefill.requests[0].routed == RoutedRoom(7)
    assert (prefill.requests[0].sampling.max_tokens, prefill.requests[0].sampling.min_tokens) == (1, 0)
    assert answer.json()["usage"]["completion_tokens"] == 1
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_a_routed_stream_fails_as_an_event(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.route_error = RequestFailed(Failure("component_mismatch", "swa: differs", "swa"))
    answer = await complete(client, stream=True, **NAMED)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert '"component":"swa"' in answer.text
    assert "[DONE]" not in answer.text
    assert backend.all_over()


@pytest.mark.parametrize("stream", [False, True])
async def test_other_routed_failures_have_a_status(
    client: httpx.AsyncClient, at_prefill: httpx.AsyncClient, backend: FakeBackend, prefill: FakeBackend, stream: bool
) -> None:
    failure = RequestFailed(Failure("deadline", "late"))
    prefill.script.route_error = backend.script.refuse = failure
    for node in (client, at_prefill):
        answer = await complete(node, stream=stream, **NAMED)
        assert error_of(answer, 504)["code"] == "deadline"
    backend.script.refuse, backend.script.route_error = None, failure
    assert (await complete(client, stream=False, **NAMED)).status_code == 504


async def test_the_schema_says_what_a_room_is(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        one, many, nothing = schemas[name]["properties"]["bootstrap_room"]["anyOf"]
        assert one == many["items"] == {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_ROOM + 1}
        assert nothing == {"type": "null"}
