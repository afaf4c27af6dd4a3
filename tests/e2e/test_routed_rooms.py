"""A pair of processes behind a router: plain HTTP, the same body to both nodes at the same time, with a room in it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from cluster import Pair, until

from tests.support.processes import SLOW_MODEL, process_pair

AT_ONCE_S = 1.0
PAIR_S = 2.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG_PROMPT = [10 + i % 400 for i in range(3000)]
OPTIONS = ("--slots", "4", "--poison", "--deadline", f"pair={PAIR_S:g}", *SLOW_MODEL)

_rooms = itertools.count(2**62 + 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("routed")
    p_options = ("--chunk-tokens", "64", "--permute-ids", "3", *OPTIONS)
    with process_pair(directory, p_options, ("--permute-ids", "4", "--spec-tokens", "3", *OPTIONS)) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    shared.heal()
    yield shared
    shared.wait_all_free(5)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


def in_room(pair: Pair, room: Any = None, **body: Any) -> dict[str, Any]:
    """A body as the router sends it."""
    host, port = pair.address.split(":")
    named = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": next(_rooms)}
    return {
        "prompt": [20, 30, 40],
        "max_tokens": 8,
        **body,
        **named,
        **({} if room is None else {"bootstrap_room": room}),
    }


async def route(
    http: httpx.AsyncClient, pair: Pair, body: dict[str, Any], path: str = COMPLETIONS
) -> tuple[httpx.Response, httpx.Response]:
    """What P and D answer."""
    at_p, at_d = await asyncio.gather(*(http.post(f"{node.url}{path}", json=body) for node in (pair.p, pair.d)))
    return at_p, at_d


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_the_decode_node_answers_as_without_a_router_and_the_prefill_node_with_one_token(
    http: httpx.AsyncClient, pair: Pair
) -> None:
    for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": 7, "prompt": [5 + i % 500 for i in range(390)]}):
        wanted = await http.post(f"{pair.d.url}{COMPLETIONS}", json={"prompt": [20, 30, 40], "max_tokens": 8, **fields})
        body = in_room(pair, **fields)
        at_p, at_d = await route(http, pair, body)
        assert at_d.json()["choices"] == wanted.json()["choices"]
        assert at_p.json()["usage"]["completion_tokens"] == 1
        (choice,) = at_p.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert at_d.json()["choices"][0]["text"].startswith(choice["text"])
        for answer in (at_p, at_d):
            assert answer.headers["x-pd-room"] == str(body["bootstrap_room"])
            assert answer.headers["x-pd-prefill"] == pair.address


async def test_streams_and_chats_and_several_samples(http: httpx.AsyncClient, pair: Pair) -> None:
    at_p, at_d = await route(http, pair, in_room(pair, stream=True))
    assert [events(answer)[-1] for answer in (at_p, at_d)] == ["[DONE]", "[DONE]"]
    assert len(events(at_p)) == 2, "one chunk, then the end"
    assert json.loads(events(at_p)[0])["choices"][0]["finish_reason"] == "length"
    chat = in_room(pair, messages=[{"role": "user", "content": "What is 3 + 4 ?"}])
    at_p, at_d = await route(http, pair, chat, CHAT)
    assert at_p.json()["choices"][0]["finish_reason"] == "length"
    assert at_d.status_code == 200
    many = {"prompt": ["one", "two"], "n": 2, "temperature": 0.8, "seed": 3}
    wanted = await http.post(f"{pair.d.url}{COMPLETIONS}", json={"max_tokens": 8, **many})
    for rooms in ([next(_rooms), next(_rooms)], [next(_rooms) for _ in range(4)]):
        at_p, at_d = await route(http, pair, in_room(pair, rooms, **many))
        assert at_d.json()["choices"] == wanted.json()["choices"]
        assert len(at_p.json()["choices"]) == 4
        assert len(set(at_d.headers["x-pd-room"].split(","))) == 4


async def test_samples_of_a_stream_are_told_while_others_wait_for_their_slots(
    http: httpx.AsyncClient, pair: Pair
) -> None:
    """More samples than slots: the last one can only begin when another has ended, and that one is told at once."""
    n = 6
    body = in_room(pair, stream=True, n=n, temperature=0.9, seed=4, ignore_eos=True)
    at_p, at_d = await route(http, pair, body)
    assert events(at_p)[-1] == "[DONE]"
    *chunks, done = events(at_d)
    assert done == "[DONE]"
    parts = [json.loads(chunk)["choices"][0] for chunk in chunks]
    begins = {part["index"]: i for i, part in reversed(list(enumerate(parts)))}
    ends = {part["index"]: i for i, part in enumerate(parts) if part["finish_reason"] is not None}
    assert sorted(begins) == sorted(ends) == list(range(n))
    assert min(ends.values()) < max(begins.values())
    pd = json.loads(chunks[-1])["pd"]
    assert pd["prefill"] == pair.address
    assert len(set(pd["room"].split(","))) == n


async def test_more_rooms_than_slots_are_all_answered(http: httpx.AsyncClient, pair: Pair) -> None:
    bodies = [in_room(pair, prompt=[20 + i, 30, 40]) for i in range(24)]
    answers = await asyncio.gather(*(route(http, pair, body) for body in bodies))
    assert [answer.status_code for both in answers for answer in both] == [200] * 48


async def test_half_a_room_ends_by_its_deadline_with_a_clear_error(http: httpx.AsyncClient, pair: Pair) -> None:
    for node, missing in ((pair.p, "no decode node reserved room"), (pair.d, "no request for room")):
        body, started = in_room(pair), time.monotonic()
        error = error_of(await http.post(f"{node.url}{COMPLETIONS}", json=body), 504)
        assert PAIR_S <= time.monotonic() - started < 5 * PAIR_S
        assert f"{missing} {body['bootstrap_room']}" in error["message"]
        assert error["code"] == "deadline"


async def test_half_a_room_of_a_stream_ends_as_an_error_event(http: httpx.AsyncClient, pair: Pair) -> None:
    at_d = await http.post(f"{pair.d.url}{COMPLETIONS}", json=in_room(pair, stream=True))
    assert at_d.status_code == 200
    assert json.loads(events(at_d)[-1])["error"]["code"] == "deadline"


async def test_different_prompts_are_refused_on_both_nodes(http: httpx.AsyncClient, pair: Pair) -> None:
    body = in_room(pair)
    started = time.monotonic()
    answers = await asyncio.gather(
        http.post(f"{pair.p.url}{COMPLETIONS}", json=body | {"prompt": [20, 30, 41]}),
        http.post(f"{pair.d.url}{COMPLETIONS}", json=body),
    )
    assert time.monotonic() - started < 5 * AT_ONCE_S
    for answer in answers:
        assert error_of(answer, 400)["code"] == "prompt_mismatch"


async def test_a_room_in_use_is_a_409_and_the_first_request_is_answered(http: httpx.AsyncClient, pair: Pair) -> None:
    body = in_room(pair, prompt=LONG_PROMPT)
    first = asyncio.create_task(route(http, pair, body))
    await asyncio.to_thread(until, lambda: pair.p.counts("slots")["reserved"] > 0, 20, "the prompt is computed")
    for answer in await route(http, pair, body):
        assert error_of(answer, 409)["code"] == "duplicate_room"
    assert [answer.status_code for answer in await first] == [200, 200]


@pytest.mark.parametrize("room", [-1, 2**63, 10**30, "5", 5.0, True, [], None])
async def test_a_room_that_is_none_is_a_400_by_name_on_both_nodes(
    http: httpx.AsyncClient, pair: Pair, room: Any
) -> None:
    body = in_room(pair) | {"bootstrap_room": room}
    for answer in await route(http, pair, body):
        assert error_of(answer, 400)["param"] == "bootstrap_room"


async def test_a_prefill_node_that_is_not_known_is_a_503(http: httpx.AsyncClient, pair: Pair) -> None:
    body = in_room(pair) | {"bootstrap_port": 1}
    answer = await http.post(f"{pair.d.url}{COMPLETIONS}", json=body)
    assert error_of(answer, 503)["code"] == "unknown_prefill"
    assert "retry-after" in answer.headers
    assert pair.address in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_leaves_nothing_on_either_node(
    http: httpx.AsyncClient, pair: Pair, stream: bool
) -> None:
    request = asyncio.create_task(route(http, pair, in_room(pair, prompt=LONG_PROMPT, stream=stream)))
    await asyncio.to_thread(until, lambda: pair.p.counts("slots")["reserved"] > 0, 20, "the prompt is computed")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await asyncio.to_thread(pair.wait_all_free, 5)
    assert pair.p.info()["unpaired"] == {"http": 0, "rooms": 0}
    at_p, at_d = await route(http, pair, in_room(pair))
    assert (at_p.status_code, at_d.status_code) == (200, 200)


async def test_load_is_told_to_routers(http: httpx.AsyncClient, pair: Pair) -> None:
    request = asyncio.create_task(route(http, pair, in_room(pair, prompt=LONG_PROMPT)))
    await asyncio.to_thread(until, lambda: pair.p.counts("slots")["reserved"] > 0, 20, "the prompt is computed")
    for node in (pair.p, pair.d):
        [load] = (await http.get(f"{node.url}/get_load")).json()
        assert load["num_reqs"] == 1
        assert load["num_tokens"] >= len(LONG_PROMPT)
    await request
