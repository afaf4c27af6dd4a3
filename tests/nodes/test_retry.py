"""A room that fails before its commit is tried once more, on another prefill node; queues have an end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from server.decode.node import DecodeNode
from server.engine.request import GenerationRequest, RouteInfo
from server.failure import RequestFailed
from server.transfer.protocol import Abort, Rejected
from server.transfer.rooms import RoomKey
from tests.nodes.support import FAST, NodeUnderTest, Pair, all_free, answer, deaf_to, expected, request
from tests.support.waiting import until
from tests.transfer.support import make_geometry

DROP = ("drop:swa",)


def address(p: NodeUnderTest) -> str:
    return f"127.0.0.1:{p.node.bootstrap_port}"


async def routed(node: DecodeNode, asked: GenerationRequest) -> tuple[list[int], RouteInfo]:
    generation = node.submit(asked)
    route = await generation.route()
    return [token async for output in generation for token in output.token_ids], route


async def test_a_failure_before_the_commit_is_retried_on_another_node(pair: Pair) -> None:
    bad, good = await pair.prefill(faults=DROP), await pair.prefill()
    d = await pair.decode(bad, good)
    tokens, route = await routed(d.node, request(270))
    assert tokens == expected(request(270))
    assert d.engine.wrong_bytes == []
    assert (route.prefill, route.n_retries) == (address(good), 1)
    assert d.metric("pd_retries_total", reason="component_mismatch") == 1
    (first,), (second,) = bad.engine.prefilled, good.engine.prefilled
    assert isinstance(first, RoomKey)
    assert isinstance(second, RoomKey)
    assert first.room == second.room == route.room
    assert second.epoch > first.epoch, "a new reservation attempt"
    await until(lambda: all(all_free(side) for side in (bad, good, d)))
    assert not d.node.manager.reqs
    assert not d.node.manager.by_room


async def test_a_fault_of_the_request_is_not_retried(pair: Pair) -> None:
    small, big = await pair.prefill(geometry=make_geometry(pages=3)), await pair.prefill()
    d = await pair.decode(small, big)
    with pytest.raises(RequestFailed) as caught:
        await answer(d.node, request(600))
    assert caught.value.kind == "request"
    assert big.engine.prefilled == []


async def test_without_another_node_the_failure_is_told_at_once(pair: Pair) -> None:
    bad = await pair.prefill(faults=("drop:swa:1",))
    d = await pair.decode(bad, "127.0.0.1:1", wait=False)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    with pytest.raises(RequestFailed, match="swa"):
        await answer(d.node, request(270))
    assert d.metric("pd_retries_total", reason="component_mismatch") == 0


async def test_the_rooms_of_a_node_that_ends_go_to_another(pair: Pair) -> None:
    first, second = await pair.prefill(), await pair.prefill()
    d = await pair.decode(first, second)
    first.engine.gate.clear()
    second.engine.gate.clear()
    asked = [request(300, seed=i) for i in range(2)]
    answers = [asyncio.create_task(routed(d.node, one)) for one in asked]
    await until(lambda: first.counts()["slots"]["reserved"] == second.counts()["slots"]["reserved"] == 1)
    second.engine.gate.set()
    await pair.stop(first)
    results = [await one for one in answers]
    assert [tokens for tokens, _ in results] == [expected(one) for one in asked]
    assert sorted(route.n_retries for _, route in results) == [0, 1]
    assert {route.prefill for _, route in results} == {address(second)}
    assert d.metric("pd_retries_total", reason="shutting_down") == 1


async def test_a_node_that_ends_says_so_until_it_is_heard(pair: Pair) -> None:
    """The first words of its end are lost; it must not be taken for a node that fell silent."""
    lost = ("drop-message:Failed:1", "drop-message:Quiesced:1")
    first, second = await pair.prefill(faults=lost), await pair.prefill()
    d = await pair.decode(first, second, deadlines=replace(FAST, peer_s=60.0))
    first.engine.gate.clear()
    generation = d.node.submit(request(300))
    await until(lambda: first.counts()["slots"]["reserved"] == 1)
    await pair.stop(first)
    route = await generation.route()
    assert (route.prefill, route.n_retries) == (address(second), 1)
    assert d.metric("pd_retries_total", reason="shutting_down") == 1


async def test_a_retry_waits_for_memory_but_not_for_a_node_that_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only slot is in quarantine, as the first node does not answer the abort; then the second node ends."""
    bad, good = await pair.prefill(faults=DROP), await pair.prefill()
    d = await pair.decode(bad, good, geometry=make_geometry(slots=2), deadlines=replace(FAST, quiesce_s=60.0))
    with monkeypatch.context() as patched:
        ignored = deaf_to(bad, Abort | Rejected, patched)
        generation = d.node.submit(request(270))
        await until(lambda: len(d.node.manager.queue) == 1)
        assert d.node.server_info()["quarantine"][0]["code"] == "component_mismatch"
        assert d.metric("pd_quarantine_oldest_seconds") > 0
        await pair.stop(good)
        with pytest.raises(RequestFailed, match="swa"):
            await generation.route()
        assert ignored
    await until(lambda: all_free(d))
    assert d.node.server_info()["quarantine"] == []
    assert d.metric("pd_quarantine_oldest_seconds") == 0


async def test_a_full_prefill_node_refuses_and_another_serves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.decode.peer_pool.UNWILLING_S", 600.0)
    full, free = await pair.prefill(geometry=make_geometry(slots=2), max_queue=1), await pair.prefill()
    filler = await pair.decode(full)
    full.engine.gate.clear()
    waiting = [filler.node.submit(request(20, seed=i)) for i in range(2)]
    await until(lambda: full.node.server_info()["waiting"] == 1)
    with pytest.raises(RequestFailed, match="1 rooms wait for the prefill node already") as caught:
        await answer(filler.node, request(20, seed=3))
    assert (caught.value.kind, caught.value.code) == ("unavailable", "overloaded")
    d = await pair.decode(full, free)
    tokens, route = await routed(d.node, request(30))
    assert (tokens, route.prefill, route.n_retries) == (expected(request(30)), address(free), 1)
    tokens, route = await routed(d.node, request(31))
    assert (route.prefill, route.n_retries) == (address(free), 0), "one that has just refused comes last"
    full.engine.gate.set()
    for generation in waiting:
        assert [output async for output in generation]


async def test_a_full_decode_node_refuses_at_once(pair: Pair) -> None:
    d = await pair.decode(await pair.prefill(), geometry=make_geometry(slots=2), max_queue=2)
    d.engine.gate.clear()
    accepted = [d.node.submit(request(20, seed=i)) for i in range(3)]
    with pytest.raises(RequestFailed, match="2 requests wait for a slot and pages already") as caught:
        d.node.submit(request(20, seed=4))
    assert (caught.value.kind, caught.value.code) == ("unavailable", "overloaded")
    assert len(d.node.manager.reqs) == 3, "nothing is left of it"
    d.engine.gate.set()
    for generation in accepted:
        assert [output async for output in generation]


async def test_a_request_behind_one_that_was_given_up_need_not_wait_for_a_third(pair: Pair) -> None:
    d = await pair.decode(await pair.prefill(), geometry=make_geometry(slots=4, pages=15, extra_rows=2))
    d.engine.gate.clear()
    occupant = d.node.submit(request(9, max_tokens=2000))
    too_long, short = d.node.submit(request(2000)), d.node.submit(request(5))
    assert len(d.node.manager.queue) == 2
    too_long.abort()
    await until(lambda: not d.node.manager.queue)
    occupant.abort()
    d.engine.gate.set()
    assert [t async for o in short for t in o.token_ids] == expected(request(5))


async def test_a_room_that_is_over_leaves_the_prefill_nodes_queue(pair: Pair) -> None:
    p = await pair.prefill(geometry=make_geometry(slots=2))
    d = await pair.decode(p)
    p.engine.gate.clear()
    running, _, last = [d.node.submit(request(20, seed=i)) for i in range(3)]
    await until(lambda: len(p.node.manager.queue) == 2)
    last.abort()
    await until(lambda: len(p.node.manager.queue) == 1)
    p.engine.gate.set()
    assert [output async for output in running]


async def test_sixty_four_rooms_at_once_on_two_slots(pair: Pair) -> None:
    p = await pair.prefill(geometry=make_geometry(slots=3))
    d = await pair.decode(p, geometry=make_geometry(slots=3, extra_rows=2))
    asked = [request(1 + 37 * i % 400, seed=i) for i in range(64)]
    assert await asyncio.gather(*(answer(d.node, one) for one in asked)) == [expected(one) for one in asked]
    assert d.engine.wrong_bytes == []
    await until(lambda: all_free(p) and all_free(d))


@pytest.mark.parametrize("n", [512, 513])
async def test_a_prompt_at_the_prefill_nodes_limit_and_one_token_longer(pair: Pair, n: int) -> None:
    p = await pair.prefill(geometry=make_geometry(pages=3))
    d = await pair.decode(p)
    if n == 512:
        assert await answer(d.node, request(n)) == expected(request(n))
    else:
        with pytest.raises(RequestFailed, match="513 tokens, the prefill node computes at most 512") as caught:
            await answer(d.node, request(n))
        assert caught.value.kind == "request"
    await until(lambda: all_free(p) and all_free(d))
