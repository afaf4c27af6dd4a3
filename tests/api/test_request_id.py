"""Every answer and every error names its request, and the room where there is one."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from server.api.http_limits import HttpLimits
from server.failure import Failure, RequestFailed
from tests.api.fakes import FakeBackend
from tests.api.harness import COMPLETIONS, events_of

PROMPT = {"prompt": "Tom has", "max_tokens": 4}


async def test_the_clients_id_is_taken_and_comes_back_in_header_and_body(client: httpx.AsyncClient) -> None:
    answer = await client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "trace-17"})
    assert answer.headers["x-request-id"] == "trace-17"
    assert answer.json()["id"] == "cmpl-trace-17"
    assert answer.json()["pd"]["request_id"] == "trace-17"


async def test_a_stream_has_it_in_its_head_and_in_every_chunk(client: httpx.AsyncClient) -> None:
    answer = await client.post(COMPLETIONS, json=PROMPT | {"stream": True}, headers={"x-request-id": "trace-17"})
    assert answer.headers["x-request-id"] == "trace-17"
    assert {chunk["id"] for chunk in events_of(answer)[:-1]} == {"cmpl-trace-17"}


@pytest.mark.parametrize("path", ["/health", "/metrics", "/nowhere", "/v1/models"])
async def test_every_path_draws_one_where_the_client_has_none(client: httpx.AsyncClient, path: str) -> None:
    ids = {(await client.get(path)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(len(one) == 32 for one in ids)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"two words", "twowords"),
        (b"<b>\xffx\t</b>", "bx/b"),
        (b"x" * 5000, "x" * 128),
        (b"a=1:b/c+d@e.f_g-h", "a=1:b/c+d@e.f_g-h"),
    ],
)
async def test_only_harmless_characters_are_kept_and_not_too_many(
    client: httpx.AsyncClient, sent: bytes, kept: str
) -> None:
    answer = await client.get("/health", headers={b"x-request-id": sent})
    assert answer.headers["x-request-id"] == kept


async def test_an_id_with_nothing_to_keep_is_drawn(client: httpx.AsyncClient) -> None:
    assert len((await client.get("/health", headers={"x-request-id": "<>"})).headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, b"{"),
        ("POST", COMPLETIONS, b'{"prompt": "x", "max_tokens": 0}'),
        ("POST", COMPLETIONS, b'{"prompt": "x", "model": "another"}'),
        ("GET", COMPLETIONS, b""),
        ("GET", "/nowhere", b""),
    ],
)
async def test_every_error_has_it_in_header_and_body(
    client: httpx.AsyncClient, method: str, path: str, body: bytes
) -> None:
    headers = {"x-request-id": "trace-17", "content-type": "application/json"}
    answer = await client.request(method, path, content=body, headers=headers)
    assert answer.status_code >= 400
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "trace-17"


async def test_a_fault_of_this_server_has_it_too(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.refuse = ValueError("a bug")
    answer = await client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "trace-17"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "trace-17"


async def test_a_failed_room_is_named_in_header_and_body(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.route_error = RequestFailed(Failure("transfer_failed", "the room failed"), room=71)
    answer = await client.post(COMPLETIONS, json=PROMPT)
    assert answer.headers["x-pd-room"] == "71"
    assert answer.json()["error"]["room"] == "71"


async def test_a_failed_stream_names_request_and_room_in_its_last_event(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script.fail_after = 2
    backend.script.failure = RequestFailed(Failure("engine_error", "the room failed"), room=71)
    answer = await client.post(COMPLETIONS, json=PROMPT | {"stream": True}, headers={"x-request-id": "trace-17"})
    error = events_of(answer)[-1]["error"]
    assert (error["request_id"], error["room"]) == ("trace-17", "71")


async def test_a_refused_room_that_a_router_named_is_named(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.refuse = RequestFailed(Failure("duplicate_room", "it is in use"))
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 71}
    answer = await client.post(COMPLETIONS, json=PROMPT | room)
    assert answer.status_code == 409
    assert answer.headers["x-pd-room"] == "71"
    assert answer.json()["error"]["room"] == "71"


def test_a_refusal_before_the_request_is_read_has_an_id_of_its_own() -> None:
    head, _, body = HttpLimits().refusal("url_too_long").response([]).partition(b"\r\n\r\n")
    assert f"x-request-id: {json.loads(body)['error']['request_id']}\r\n".encode() in head + b"\r\n"


async def test_a_request_that_no_node_works_for_has_its_line_from_here(
    client: httpx.AsyncClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The others have theirs from the node that worked for them."""
    caplog.set_level(logging.INFO, logger="server.api.request_id")
    await client.post(COMPLETIONS, json=PROMPT | {"max_tokens": 0}, headers={"x-request-id": "a"})
    await client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "b"})
    backend.script.route_error = RequestFailed(Failure("transfer_failed", "the room failed"))
    await client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "c"})
    ours = [record.message for record in caplog.records if record.name == "server.api.request_id"]
    assert ours == ["request id=a status=400 outcome=invalid_value"]
