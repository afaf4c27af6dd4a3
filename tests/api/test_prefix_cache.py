"""What clients say and are told of the prefix cache: salts, and how many tokens of their prompts were found."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.api.cache_fields import MAX_SALT_CHARS, CacheFields
from server.engine.request import RoutedRoom
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import FakeBackend
from tests.api.harness import CHAT, COMPLETIONS, HELLO, MINIMAL, RESPONSES, client_of, error_of, events, events_of, post

GENERATE = "/generate"
ROUTES = [*MINIMAL.items(), (GENERATE, {"text": "x"})]
ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_every_request_carries_its_salt(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    longest = "\u00e4" * MAX_SALT_CHARS
    for salt in ({}, {"cache_salt": None}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": longest}):
        answer = await client.post(path, json={**body, **salt})
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
    salts = [request.cache_salt for request in backend.requests]
    assert (salts[:3], salts[4]) == (["", "", "a"], longest)
    assert salts[3] == CacheFields(extra_key="a").salt


async def test_all_samples_of_all_prompts_carry_it(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await client.post(COMPLETIONS, json={"prompt": ["x", "y"], "n": 2, "cache_salt": "a"})
    assert [request.cache_salt for request in backend.requests] == ["a"] * 4


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_the_prefill_nodes_half_of_a_routed_room_carries_it_too(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    backend = FakeBackend(tokenizer, role="prefill")
    async with client_of(backend) as client:
        answer = await client.post(path, json={**body, **ROOM, "cache_salt": "a"})
    assert answer.status_code == 200, answer.text
    [request] = backend.requests
    assert (request.routed, request.cache_salt) == (RoutedRoom(5, "10.0.0.1", 8998), "a")


@pytest.mark.parametrize("value", ["", "x" * (MAX_SALT_CHARS + 1), 5, True, ["a"], {"a": "b"}, "\ud800"])
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_what_is_no_salt_is_refused(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], field: str, value: Any
) -> None:
    """A tenant whose salt were left out would find what those without one left."""
    assert error_of(await post(client, path, {**body, field: value}), 400)["param"] == field
    assert backend.requests == []


async def test_a_salt_among_sampling_params_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post(GENERATE, json={"text": "x", "sampling_params": {"cache_salt": "a"}})
    assert error_of(answer, 400)["param"] == "cache_salt"


def test_two_pairs_of_salts_are_never_the_same() -> None:
    pairs = [("ab", None), ("a", "b"), (None, "ab"), ("b", "a"), (None, "a"), ("a", None), ("", "ab")]
    salts = {CacheFields.model_construct(cache_salt=salt, extra_key=key).salt for salt, key in pairs}
    assert len(salts) == len(pairs) - 1  # an empty one, which no request has, is none
    assert all(len(salt) <= MAX_SALT_CHARS for salt in salts)
    longest = "x" * MAX_SALT_CHARS
    assert len(CacheFields(cache_salt=longest, extra_key=longest).salt) <= MAX_SALT_CHARS


# --- how much was found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})])
async def test_usage_says_how_many_tokens_were_found(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    backend.script.cached = dict.fromkeys(range(4), 2)
    usage = (await client.post(path, json=body)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    chunks = await events(client, path, **body, stream_options={"include_usage": True})
    assert chunks[-2]["usage"] == usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in (await events(client, path, **body, stream_options=options))[:-1]:
        assert chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_several_samples_counts_once(
    client: httpx.AsyncClient, backend: FakeBackend, stream: bool
) -> None:
    """With what the sample found that found the least: the others found what that one had computed."""
    backend.script.cached = {0: 5, 1: 3, 2: 5, 3: 7, 4: 7, 5: 7}
    body: dict[str, Any] = {"prompt": ["x", "y"], "n": 3}
    if stream:
        usage = (await events(client, **body, stream_options={"include_usage": True}))[-2]["usage"]
    else:
        usage = (await client.post(COMPLETIONS, json=body)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3 + 7}


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_say_it_in_their_words(client: httpx.AsyncClient, backend: FakeBackend, stream: bool) -> None:
    backend.script.cached = {0: 2}
    answer = await client.post(RESPONSES, json={"input": "x", "stream": stream})
    if stream:
        assert answer.text.count('"cached_tokens":2') == 1
        assert '"input_tokens_details":{"cached_tokens":2,"cache_write_tokens":0}' in answer.text
    else:
        assert answer.json()["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_says_it_of_each_sample(client: httpx.AsyncClient, backend: FakeBackend, stream: bool) -> None:
    backend.script.cached = {0: 1, 1: 2}
    answer = await client.post(GENERATE, json={"text": "x", "sampling_params": {"n": 2}, "stream": stream})
    if stream:
        infos = {event["index"]: event["meta_info"] for event in events_of(answer)[:-1]}
    else:
        infos = dict(enumerate(one["meta_info"] for one in answer.json()))
    assert {index: info["cached_tokens"] for index, info in infos.items()} == {0: 1, 1: 2}
