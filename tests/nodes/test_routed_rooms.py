"""Rooms that a router names: each node gets its half by itself, in any order, and what ends one half ends the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from cluster.relay import control_relay

from server.engine.generation import NodeGeneration
from server.engine.request import FinishReason, GenerationRequest, RoutedRoom, TokenOutput
from server.failure import RequestFailed
from server.transfer.protocol import MAX_ROOM
from tests.nodes.support import FAST, NodeUnderTest, Pair, answer, expected, first_token_of, request
from tests.support.waiting import until

SHORT = replace(FAST, pair_s=0.6)
AT_ONCE_S = 1.0
"""Less than any deadline of :data:`FAST`: the other side was told."""


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


async def test_the_named_prefill_node_is_used_and_no_other(pair: Pair) -> None:
    ps = [await pair.prefill(), await pair.prefill()]
    d = await pair.decode(*ps)
    for i, p in enumerate([ps[1], ps[1], ps[0], ps[1]]):
        asked = named(20, p, room=i)
        p.node.submit(asked)
        assert tokens(await outputs(d.node.submit(asked))) == expected(asked)
    assert [len(p.engine.prefilled) for p in ps] == [1, 3]


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


# --- memory, and what is not taken ---

N_LONELY = 40


def n_unpaired(p: NodeUnderTest) -> int:
    n: int = p.node.server_info()["unpaired"]["rooms"]
    return n


async def test_rooms_whose_request_does_not_come_to_the_prefill_node_hold_no_memory(pair: Pair) -> None:
    """They are ten times as many as the decode node has slots, and nobody else waits for them."""
    p = await pair.prefill()
    d = await pair.decode(p)
    lonely = [d.node.submit(named(20, p, room=room)) for room in range(N_LONELY)]
    await until(lambda: n_unpaired(p) == N_LONELY)
    for seed in range(6):
        assert await answer(d.node, request(20, seed)) == expected(request(20, seed))
    await all_memory_free(d)
    assert not any(generation.ended for generation in lonely), "they still wait"
    asked = named(20, p, room=N_LONELY - 1)
    assert tokens(await outputs(p.node.submit(asked))) == expected(asked)[:1], "their turn comes with their request"
    assert tokens(await outputs(lonely.pop())) == expected(asked)
    for generation in lonely:
        generation.abort()
    await until(lambda: n_unpaired(p) == 0)
    await all_free(p, d)


async def all_memory_free(d: NodeUnderTest) -> None:
    await until(lambda: all(counts["free"] == sum(counts.values()) for counts in d.counts().values()))


async def test_memory_is_taken_when_the_request_has_arrived_and_before_it_is_computed(pair: Pair) -> None:
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address)
        asked = named_at(wire.address)
        wire.hold = {"Reserve"}
        at_d = d.node.submit(asked)
        await until(lambda: n_unpaired(p) == 1)
        await all_memory_free(d)
        at_p = p.node.submit(asked)
        await until(lambda: bool(wire.held))
        assert wire.answers["RequestArrived"] >= 1
        assert d.counts()["slots"]["reserved"] == 1
        assert not p.engine.prefilled
        wire.hold = set()
        for passed in wire.held:
            wire.send(passed)
        assert tokens(await outputs(at_d)) == expected(asked)
        assert tokens(await outputs(at_p)) == expected(asked)[:1]
        await all_free(p, d)


def named_at(address: str, room: int = 7) -> GenerationRequest:
    """A request whose router knows the prefill node as ``address``."""
    host, _, port = address.rpartition(":")
    return replace(request(300), routed=RoutedRoom(room, host, int(port)))


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_request_that_the_prefill_node_does_not_take_ends_the_decode_nodes_half_at_once(
    pair: Pair, first: str
) -> None:
    p = await pair.prefill(max_queue=1)
    d = await pair.decode(p)
    p.node.submit(named(20, p, room=1))
    asked = named(20, p, room=2)
    at_d = d.node.submit(asked) if first == "decode" else None
    if at_d is not None:
        await until(lambda: n_unpaired(p) == 1)
    with pytest.raises(RequestFailed):
        p.node.submit(asked)
    error = await failure(at_d or d.node.submit(asked), AT_ONCE_S)
    assert (error.code, error.kind) == ("overloaded", "unavailable")
    assert n_unpaired(p) == 0


async def test_a_lost_failed_of_a_room_that_waits_for_memory_is_sent_again(pair: Pair) -> None:
    p = await pair.prefill(faults=("drop-message:Failed:1",))
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address)
        await fill(d)
        asked = named_at(wire.address)
        at_d, at_p = d.node.submit(asked), p.node.submit(asked)
        await until(lambda: wire.answers["RequestArrived"] > 0)
        at_p.abort()
        assert (await failure(at_d)).code == "prefill_client_gone"
        d.engine.gate.set()
        await all_free(p, d)
