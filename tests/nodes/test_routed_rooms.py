"""Rooms that a router names: each node gets its half by itself, in any order, and what ends one half ends the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from server.engine.generation import NodeGeneration
from server.engine.request import FinishReason, GenerationRequest, RoutedRoom, TokenOutput
from server.failure import RequestFailed
from server.transfer.protocol import MAX_ROOM
from tests.nodes.support import FAST, NodeUnderTest, Pair, expected, first_token_of, pairs, request, until

SHORT = replace(FAST, pair_s=0.6)
AT_ONCE_S = 1.0
"""Less than any deadline of :data:`FAST`: the other side was told."""


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs() as pair:
        yield pair


def named(n: int, p: NodeUnderTest, room: int = 7, seed: int = 0, **sampling: Any) -> GenerationRequest:
    return replace(request(n, seed, **sampling), routed=RoutedRoom(room, "127.0.0.1", p.node.bootstrap_port))


async def outputs(generation: NodeGeneration) -> list[TokenOutput]:
    async with asyncio.timeout(60):
        await generation.route()
        return [output async for output in generation]


def tokens(found: list[TokenOutput]) -> list[int]:
    return [token for output in found for token in output.token_ids]


async def fill(d: NodeUnderTest) -> None:
    """Takes every slot of a decode node, until its engine's gate is opened."""
    d.engine.gate.clear()
    for seed in range(d.counts()["slots"]["free"]):
        async with asyncio.timeout(60):
            await d.node.submit(request(20, seed=100 + seed)).route()
    assert d.counts()["slots"]["free"] == 0


async def failure(generation: NodeGeneration, within_s: float = 5.0) -> RequestFailed:
    async with asyncio.timeout(within_s):
        with pytest.raises(RequestFailed) as caught:
            await generation.route()
    return caught.value


async def all_free(*nodes: NodeUnderTest) -> None:
    def is_free(node: NodeUnderTest) -> bool:
        return all(counts["free"] == sum(counts.values()) for counts in node.counts().values())

    await until(lambda: all(is_free(node) for node in nodes), what="slots and pages of both nodes are free")
    for node in nodes:
        await until(lambda node=node: node.node.load()["num_reqs"] == 0, what="no request is left")  # type: ignore[misc]


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("room", [0, 2**53 + 1, MAX_ROOM])
async def test_the_two_halves_meet_in_either_order(pair: Pair, first: str, room: int) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = named(300, p, room)
    if first == "prefill":
        at_p = p.node.submit(asked)
        await asyncio.sleep(0)
        assert p.counts()["slots"]["reserved"] == 0, "no slot for half a room"
        at_d = d.node.submit(asked)
    else:
        at_d = d.node.submit(asked)
        await until(lambda: p.node.server_info()["unpaired"]["rooms"] == 1)
        assert p.counts()["slots"]["reserved"] == 0, "no slot for half a room"
        at_p = p.node.submit(asked)
    assert tokens(await outputs(at_d)) == expected(asked)
    (answer,) = await outputs(at_p)
    assert (answer.token_ids, answer.finish_reason) == ((first_token_of(asked.prompt_ids),), FinishReason.LENGTH)
    for generation in (at_p, at_d):
        route = await generation.route()
        assert (route.room, route.prefill) == (room, f"127.0.0.1:{p.node.bootstrap_port}")
    assert d.engine.wrong_bytes == []
    assert len(p.engine.prefilled) == 1
    await all_free(p, d)


async def test_the_prefill_node_answers_when_the_decode_node_has_committed(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = named(300, p, max_tokens=4)
    d.engine.gate.clear()
    at_d, at_p = d.node.submit(asked), p.node.submit(asked)
    assert tokens(await outputs(at_p)) == expected(asked)[:1], "the decode node has not decoded yet"
    d.engine.gate.set()
    assert tokens(await outputs(at_d)) == expected(asked)


async def test_the_sampling_is_the_decode_node_s(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    asked = named(20, p, temperature=1.0, max_tokens=9)
    at_d = d.node.submit(asked)
    p.node.submit(replace(asked, sampling=replace(asked.sampling, max_tokens=1)))
    await until(lambda: p.counts()["slots"]["reserved"] == 1)
    ((req_at_p,), (req_at_d,)) = p.node.manager.reqs.values(), d.node.manager.reqs.values()
    assert req_at_p.request.sampling == req_at_d.request.sampling
    assert req_at_p.request.sampling.seed is not None, "both must draw the same numbers"
    p.engine.gate.set()
    assert tokens(await outputs(at_d)) == expected(asked)


async def test_many_rooms_on_few_slots(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = [named(20 + i, p, room=i) for i in range(40)]
    at_d = [d.node.submit(one) for one in asked]
    at_p = [p.node.submit(one) for one in reversed(asked)]
    for one, generation in zip(asked, at_d, strict=True):
        assert tokens(await outputs(generation)) == expected(one)
    for one, generation in zip(reversed(asked), at_p, strict=True):
        assert tokens(await outputs(generation)) == expected(one)[:1]
    assert d.engine.wrong_bytes == []
    await all_free(p, d)


async def test_a_room_without_its_decode_half_ends_by_its_deadline(pair: Pair) -> None:
    p = await pair.prefill(deadlines=SHORT)
    d = await pair.decode(p)
    error = await failure(p.node.submit(named(20, p)))
    assert (error.code, error.kind) == ("deadline", "deadline")
    assert "no decode node reserved room 7" in error.failure.reason
    assert "0.6 s" in error.failure.reason
    asked = request(20)
    assert tokens(await outputs(d.node.submit(asked))) == expected(asked), "both are alive"
    await all_free(p, d)


async def test_a_room_without_its_prefill_half_ends_by_its_deadline(pair: Pair) -> None:
    p = await pair.prefill(deadlines=SHORT)
    d = await pair.decode(p)
    error = await failure(d.node.submit(named(20, p)))
    assert (error.code, error.kind) == ("deadline", "deadline")
    assert "phase pair on the prefill node: no request for room 7 came over HTTP" in error.failure.reason
    await all_free(p, d)


async def test_waiting_for_memory_on_the_decode_node_is_no_silence(pair: Pair) -> None:
    p = await pair.prefill(deadlines=replace(FAST, pair_s=4.0))
    d = await pair.decode(p)
    await fill(d)
    asked = named(20, p)
    at_d, at_p = d.node.submit(asked), p.node.submit(asked)
    await asyncio.sleep(5.5)  # the deadline is what is tested
    assert p.node.server_info()["unpaired"]["http"] == 1
    assert not at_p.ended
    d.engine.gate.set()
    assert tokens(await outputs(at_d)) == expected(asked)
    assert tokens(await outputs(at_p)) == expected(asked)[:1]


@pytest.mark.parametrize("phase", ["alone", "waiting on D", "prefill"])
async def test_a_client_that_leaves_the_prefill_node_ends_both_halves(pair: Pair, phase: str) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    if phase == "waiting on D":
        await fill(d)
    p.engine.gate.clear()
    asked = named(300, p)
    at_p = p.node.submit(asked)
    if phase == "alone":
        at_p.abort()
    at_d = d.node.submit(asked)
    if phase == "waiting on D":
        await until(lambda: p.node.manager.routed_rooms.have_met(7))
    elif phase == "prefill":
        await until(lambda: p.counts()["slots"]["reserved"] == 1)
    at_p.abort()
    error = await failure(at_d, AT_ONCE_S)
    assert (error.code, error.kind) == ("prefill_client_gone", "peer")
    d.engine.gate.set()
    p.engine.gate.set()
    await all_free(p, d)


@pytest.mark.parametrize("phase", ["waiting on D", "pair", "prefill"])
async def test_a_client_that_leaves_the_decode_node_ends_both_halves(pair: Pair, phase: str) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    if phase == "waiting on D":
        await fill(d)
    p.engine.gate.clear()
    asked = named(300, p)
    at_d = d.node.submit(asked)
    if phase == "pair":
        await until(lambda: p.node.server_info()["unpaired"]["rooms"] == 1)
        at_d.abort()
        await until(lambda: p.node.server_info()["unpaired"]["rooms"] == 0)
        error: RequestFailed | None = None
        with pytest.raises(RequestFailed) as caught:
            p.node.submit(asked)
        error = caught.value
    else:
        at_p = p.node.submit(asked)
        if phase == "waiting on D":
            await until(lambda: p.node.manager.routed_rooms.have_met(7))
        else:
            await until(lambda: p.counts()["slots"]["reserved"] == 1)
        at_d.abort()
        error = await failure(at_p, AT_ONCE_S)
    assert (error.code, error.kind) == ("decode_gave_up", "peer")
    assert "the client aborted" in error.failure.reason
    d.engine.gate.set()
    p.engine.gate.set()
    await all_free(p, d)


async def test_different_prompts_are_refused_by_their_hash(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    for other in (named(20, p, seed=1), named(21, p)):
        at_d, at_p = d.node.submit(named(20, p)), p.node.submit(other)
        for generation in (at_d, at_p):
            error = await failure(generation, AT_ONCE_S)
            assert (error.code, error.kind) == ("prompt_mismatch", "request")
            assert "hash" in error.failure.reason
        await all_free(p, d)
    assert not p.engine.prefilled


async def test_a_room_in_use_is_a_409_on_either_node(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = named(20, p)
    p.engine.gate.clear()
    at_d, at_p = d.node.submit(asked), p.node.submit(asked)
    for _ in range(2):
        for node in (p, d):
            with pytest.raises(RequestFailed) as caught:
                node.node.submit(named(30, p))
            assert (caught.value.code, caught.value.kind) == ("duplicate_room", "conflict")
        await until(lambda: p.counts()["slots"]["reserved"] == 1)
    p.engine.gate.set()
    assert tokens(await outputs(at_d)) == expected(asked)
    assert tokens(await outputs(at_p)) == expected(asked)[:1]
    await all_free(p, d)


async def test_two_decode_nodes_cannot_have_the_same_room(pair: Pair) -> None:
    p = await pair.prefill()
    d, other = await pair.decode(p), await pair.decode(p)
    asked = named(20, p)
    at_d = d.node.submit(asked)
    await until(lambda: p.node.server_info()["unpaired"]["rooms"] == 1)
    error = await failure(other.node.submit(asked), AT_ONCE_S)
    assert (error.code, error.kind) == ("duplicate_room", "conflict")
    at_p = p.node.submit(asked)
    assert tokens(await outputs(at_d)) == expected(asked)
    assert tokens(await outputs(at_p)) == expected(asked)[:1]
    await all_free(p, d, other)


async def test_the_named_prefill_node_is_used_and_no_other(pair: Pair) -> None:
    ps = [await pair.prefill(), await pair.prefill()]
    d = await pair.decode(*ps)
    for i, p in enumerate([ps[1], ps[1], ps[0], ps[1]]):
        asked = named(20, p, room=i)
        p.node.submit(asked)
        assert tokens(await outputs(d.node.submit(asked))) == expected(asked)
    assert [len(p.engine.prefilled) for p in ps] == [1, 3]


async def test_localhost_and_letter_case_name_the_same_node(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = replace(request(20), routed=RoutedRoom(1, "LocalHost", p.node.bootstrap_port))
    p.node.submit(asked)
    assert tokens(await outputs(d.node.submit(asked))) == expected(asked)


async def test_a_prefill_node_that_is_not_known_or_not_there_is_a_503(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, "127.0.0.1:1", wait=False)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    for port, code in ((1, "no_prefill"), (2, "unknown_prefill")):
        with pytest.raises(RequestFailed) as caught:
            d.node.submit(replace(request(20), routed=RoutedRoom(1, "127.0.0.1", port)))
        assert (caught.value.code, caught.value.kind) == (code, "unavailable")
        assert f"127.0.0.1:{port}" in caught.value.failure.reason
    local = await pair.decode(local=True)
    with pytest.raises(RequestFailed, match="--local-prefill") as caught:
        local.node.submit(named(20, p))
    assert caught.value.kind == "request"


async def test_a_failure_on_the_prefill_node_reaches_both_clients_at_once(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.fail_next = True
    asked = named(20, p)
    at_d, at_p = d.node.submit(asked), p.node.submit(asked)
    for generation in (at_d, at_p):
        assert (await failure(generation, AT_ONCE_S)).code == "engine_error"
    await all_free(p, d)


async def test_a_mismatch_is_told_to_both_clients_by_component(pair: Pair) -> None:
    p = await pair.prefill(faults=("zero:swa",))
    d = await pair.decode(p)
    asked = named(20, p)
    at_d, at_p = d.node.submit(asked), p.node.submit(asked)
    for generation in (at_d, at_p):
        error = await failure(generation)
        assert (error.component, error.kind) == ("swa", "peer")
    await all_free(p, d)


async def test_a_prefill_node_that_goes_takes_its_waiting_rooms_with_it(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    await fill(d)
    asked = named(20, p)
    at_p, at_d = p.node.submit(asked), d.node.submit(asked)
    await until(lambda: p.node.manager.routed_rooms.have_met(7))
    await pair.stop(p)
    assert (await failure(at_p, AT_ONCE_S)).code == "shutting_down"
    error = await failure(at_d, FAST.peer_s + 2)
    assert error.kind in ("peer", "unavailable")
    d.engine.gate.set()
    await all_free(d)


async def test_a_prefill_node_takes_no_request_without_a_room(pair: Pair) -> None:
    p = await pair.prefill()
    with pytest.raises(RequestFailed) as caught:
        p.node.submit(request(20))
    assert (caught.value.code, caught.value.kind) == ("wrong_role", "request")


async def test_an_answer_that_cannot_be_written_fails_that_client_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)

    def broken(ids: list[int]) -> str:
        raise RuntimeError("simulated")

    with monkeypatch.context() as patch:
        patch.setattr(p.node.tokenizer, "decode", broken)
        asked = named(20, p)
        at_p, at_d = p.node.submit(asked), d.node.submit(asked)
        assert tokens(await outputs(at_d)) == expected(asked)
        error = await failure(at_p)
    assert (error.code, error.kind) == ("internal_error", "internal")
    assert "simulated" in error.failure.reason
    await all_free(p, d)
    at_p, at_d = p.node.submit(asked), d.node.submit(asked)
    assert tokens(await outputs(at_d)) == expected(asked)
    assert tokens(await outputs(at_p)) == expected(asked)[:1]
    await all_free(p, d)


async def test_a_prefill_node_that_drains_ends_what_is_not_paired_and_answers_what_is(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    asked, lonely, orphan = (named(20, p, room=room) for room in (1, 2, 3))
    at_p, at_d = p.node.submit(asked), d.node.submit(asked)
    halves = [p.node.submit(lonely), d.node.submit(orphan)]
    await until(lambda: p.counts()["slots"]["reserved"] == 1 and p.node.server_info()["unpaired"]["rooms"] == 1)
    p.node.drain()
    for half in halves:
        error = await failure(half, AT_ONCE_S)
        assert (error.code, error.kind) == ("shutting_down", "unavailable")
    with pytest.raises(RequestFailed) as caught:
        p.node.submit(named(20, p, room=4))
    assert (caught.value.code, caught.value.kind) == ("shutting_down", "unavailable")
    p.engine.gate.set()
    assert tokens(await outputs(at_d)) == expected(asked)
    assert tokens(await outputs(at_p)) == expected(asked)[:1]
    await until(lambda: not p.node.busy)


async def test_more_requests_than_may_wait_are_a_503(pair: Pair) -> None:
    p = await pair.prefill(max_queue=2)
    halves = [p.node.submit(named(20, p, room=room)) for room in range(2)]
    with pytest.raises(RequestFailed) as caught:
        p.node.submit(named(20, p, room=2))
    assert (caught.value.code, caught.value.kind) == ("overloaded", "unavailable")
    for half in halves:
        half.abort()
    assert not p.node.submit(named(20, p, room=2)).ended
