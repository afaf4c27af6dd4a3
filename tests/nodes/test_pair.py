"""Both nodes in one process, real ZMQ between them, the loopback transport: the good ways and the refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from server.cache.live import live_positions
from server.engine.request import SamplingParams
from server.failure import RequestFailed
from server.transfer.protocol import MAX_ROOM
from tests.nodes.support import FAST, Pair, answer, expected, request
from tests.support.waiting import until
from tests.transfer.support import WINDOW, make_geometry


@pytest.mark.parametrize("n", [1, 3, 4, 5, 18, 127, 128, 129, 255, 256, 257, 512, 513, 1025])
async def test_every_live_byte_arrives_and_memory_returns(pair: Pair, n: int) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p_counts, d_counts = p.counts(), d.counts()
    asked = request(n)
    generation = d.node.submit(asked)
    route = await generation.route()
    assert [t async for o in generation for t in o.token_ids] == expected(asked)
    assert d.engine.wrong_bytes == []
    assert len(p.engine.prefilled) == 1, "the prefill node served it"
    assert route.prefill == f"127.0.0.1:{p.node.bootstrap_port}"
    assert route.transfer_bytes == d.arena.layout.live_nbytes(n)
    await until(lambda: (p.counts(), d.counts()) == (p_counts, d_counts))
    for side in (p, d):
        for name, nbytes in d.arena.layout.live_nbytes(n).items():
            assert side.metric("pd_transfer_bytes_total", component=name) == nbytes
        assert side.metric("pd_rooms_total", outcome="committed", reason="") == 1


async def test_no_byte_outside_the_live_ranges_changes(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    d.engine.gate.clear()
    before = d.arena.buffer.clone()
    asked = request(300)
    await d.node.submit(asked).route()
    (req,) = d.node.manager.reqs.values()
    mask = before != d.arena.buffer
    for name, rows in live_positions(300, WINDOW, d.arena.layout.names).items():
        for run in d.arena.layout.runs(name, rows, req.placement):
            mask[run.offset : run.offset + run.nbytes] = False
    assert not mask.any()
    d.engine.gate.set()


async def test_the_peer_with_fewer_rooms_is_taken(pair: Pair) -> None:
    first, second = await pair.prefill(), await pair.prefill()
    d = await pair.decode(first, second)
    asked = [request(50, seed=i) for i in range(8)]
    assert await asyncio.gather(*(answer(d.node, one) for one in asked)) == [expected(one) for one in asked]
    assert first.engine.prefilled
    assert second.engine.prefilled


async def test_two_decode_nodes_share_a_prefill_node(pair: Pair) -> None:
    p = await pair.prefill()
    d1, d2 = await pair.decode(p), await pair.decode(p)
    asked = [request(60, seed=i) for i in range(6)]
    answers = await asyncio.gather(*(answer((d1, d2)[i % 2].node, one) for i, one in enumerate(asked)))
    assert answers == [expected(one) for one in asked]


async def test_local_prefill_needs_no_peer(pair: Pair) -> None:
    d = await pair.decode(local=True)
    asked = request(40)
    generation = d.node.submit(asked)
    assert (await generation.route()).prefill == "local"
    assert [t async for o in generation for t in o.token_ids] == expected(asked)
    assert await d.node.ready() == (True, "local prefill")
    generation = d.node.submit(request(40, max_tokens=500))
    await generation.route()
    generation.abort()
    await until(lambda: d.counts()["slots"]["free"] == 3)


@pytest.mark.parametrize(
    ("n", "max_tokens", "numbers"),
    [(0, 4, ()), (4090, 7, ("4090", "7", "4096")), (1, -1, ("-1",)), (3500, 200, ("3500", "200", "3584"))],
)
async def test_what_can_never_be_served_is_400_with_the_numbers(
    pair: Pair, n: int, max_tokens: int, numbers: tuple[str, ...]
) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    with pytest.raises(RequestFailed) as caught:
        d.node.submit(request(n, max_tokens=max_tokens))
    assert caught.value.kind == "request"
    assert all(number in caught.value.failure.reason for number in numbers)
    assert d.node.server_info()["waiting"] == 0


async def test_a_token_outside_the_vocabulary_is_400(pair: Pair) -> None:
    d = await pair.decode(await pair.prefill())
    with pytest.raises(RequestFailed, match="1000") as caught:
        d.node.submit(replace(request(3), prompt_ids=(1, 1000, 2)))
    assert caught.value.kind == "request"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", float("nan")), ("top_p", 2.0), ("seed", 2**64), ("stop", ("x",) * 100), ("logprobs", 21)],
)
async def test_a_sampling_parameter_that_the_wire_refuses_is_400(pair: Pair, name: str, value: Any) -> None:
    d = await pair.decode(await pair.prefill())
    with pytest.raises(RequestFailed, match="out of range") as caught:
        d.node.submit(replace(request(3), sampling=replace(SamplingParams(), **{name: value})))
    assert caught.value.kind == "request"


async def test_a_prompt_that_only_the_prefill_node_cannot_hold_fails_with_its_reason(pair: Pair) -> None:
    p = await pair.prefill(geometry=make_geometry(pages=3))
    d = await pair.decode(p)
    with pytest.raises(RequestFailed, match="at most 512") as caught:
        await answer(d.node, request(600))
    assert (caught.value.kind, caught.value.code) == ("request", "context_length_exceeded")
    await until(lambda: d.counts()["slots"]["free"] == 3)


async def test_a_room_in_use_is_409_and_room_ids_have_63_bits(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    first = d.node.submit(request(9), room=MAX_ROOM)
    with pytest.raises(RequestFailed) as caught:
        d.node.submit(request(10), room=MAX_ROOM)
    assert caught.value.kind == "conflict"
    for room in (-1, MAX_ROOM + 1):
        with pytest.raises(RequestFailed) as caught:
            d.node.submit(request(10), room=room)
        assert caught.value.kind == "request"
    p.engine.gate.set()
    assert [t async for o in first for t in o.token_ids] == expected(request(9))
    assert (await first.route()).room == MAX_ROOM
    await until(lambda: not d.node.manager.by_room)
    assert await answer(d.node, request(10)) == expected(request(10))


async def test_without_a_peer_the_answer_is_503_with_the_reason(pair: Pair) -> None:
    d = await pair.decode("127.0.0.1:1", wait=False)
    await until(lambda: "nobody" in d.node.server_info()["peers"][0]["reason"], 1.0)
    with pytest.raises(RequestFailed, match=r"nobody listens at 127\.0\.0\.1:1 \(Connection refused\)") as caught:
        d.node.submit(request(5))
    assert (caught.value.kind, caught.value.code) == ("unavailable", "no_prefill")
    ready, reason = await d.node.ready()
    assert not ready
    assert "127.0.0.1:1" in reason


async def test_a_component_that_is_not_offered_is_refused_by_name_until_the_peer_is_replaced(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, geometry=make_geometry(draft=True), wait=False)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "refused")
    with pytest.raises(RequestFailed, match=r"components\.draft_swa differs: prefill has absent, decode has present"):
        d.node.submit(request(5))
    port = p.node.bootstrap_port
    await pair.stop(p)
    await pair.prefill(port=port, geometry=make_geometry(draft=True))
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    assert await answer(d.node, request(300)) == expected(request(300))
    assert d.engine.wrong_bytes == []


async def test_a_component_that_decode_fills_itself_is_not_asked_for(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, geometry=make_geometry(draft=True), own_components=frozenset({"draft_swa"}))
    generation = d.node.submit(request(300))
    assert "draft_swa" not in (await generation.route()).transfer_bytes
    assert [t async for o in generation for t in o.token_ids] == expected(request(300))
    assert d.engine.wrong_bytes == ["draft_swa"]


async def test_ready_means_that_a_write_of_the_peer_really_landed(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    address = f"127.0.0.1:{p.node.bootstrap_port}"
    assert await p.node.ready() == (True, f"{next(iter(p.node.manager.senders))}: not probed yet")
    assert await d.node.ready() == (True, f"prefill {address}: probe transfer ok over loopback/memory")
    ready, reason = await p.node.ready()
    assert ready
    assert "ok over loopback/memory" in reason
    d.node.manager.rooms.peers.prober.fresh_s = 0.0
    d.node.manager.rooms.peers.sessions.engines[address].unregister(d.arena.ptr)
    for node in (d.node, p.node):
        ready, reason = await node.ready()
        assert not ready
        assert "refused" in reason


async def test_a_decode_node_is_ready_only_if_every_registered_peer_can_write(pair: Pair) -> None:
    good, bad = await pair.prefill(), await pair.prefill()
    d = await pair.decode(good, bad)
    assert (await d.node.ready())[0]
    d.node.manager.rooms.peers.prober.fresh_s = 0.0
    address = f"127.0.0.1:{bad.node.bootstrap_port}"
    d.node.manager.rooms.peers.sessions.engines[address].unregister(d.arena.ptr)
    ready, reason = await d.node.ready()
    assert not ready
    assert f"prefill 127.0.0.1:{good.node.bootstrap_port}: probe transfer ok" in reason
    assert f"prefill {address}: probe transfer failed" in reason
    await pair.stop(bad)
    await until(lambda: d.node.server_info()["peers"][1]["state"] != "registered")
    assert (await d.node.ready())[0], "one that is not registered is not asked"


async def test_more_peers_than_probe_lanes_are_all_probed(pair: Pair) -> None:
    prefills = [await pair.prefill() for _ in range(6)]
    d = await pair.decode(*prefills)
    ready, reason = await d.node.ready()
    assert ready, reason
    assert reason.count("probe transfer ok") == 6


async def test_a_probe_that_comes_twice_takes_one_lane(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, faults=("duplicate-message:Probe",))
    d.node.manager.rooms.peers.prober.fresh_s = 0.0
    for _ in range(6):
        ready, reason = await d.node.ready()
        assert ready, reason
    await until(lambda: p.node.manager.probes.n_running == 0)
    assert p.node.manager.probes.n_free_lanes == 4


@pytest.mark.parametrize(
    ("p_faults", "d_faults"),
    [((), ("drop-message:Probe:1",)), (("drop-message:ProbeDone:1",), ())],
    ids=["Probe", "ProbeDone"],
)
async def test_a_probe_whose_message_is_lost_is_asked_again(
    pair: Pair, p_faults: tuple[str, ...], d_faults: tuple[str, ...]
) -> None:
    p = await pair.prefill(faults=p_faults)
    d = await pair.decode(p, faults=d_faults, deadlines=replace(FAST, probe_s=30.0))
    ready, reason = await d.node.ready()
    assert ready, reason


async def test_a_prefill_node_without_decode_nodes_is_ready(pair: Pair) -> None:
    assert await (await pair.prefill()).node.ready() == (True, "no decode node is registered yet")


async def test_the_queue_has_a_deadline_while_nothing_moves(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, deadlines=replace(FAST, admission_s=0.5))
    d.engine.gate.clear()
    running = [d.node.submit(request(5, seed=i)) for i in range(3)]
    late = d.node.submit(request(5, seed=9))
    with pytest.raises(RequestFailed, match=r"for 0\.5 s") as caught:
        await late.route()
    assert (caught.value.kind, caught.value.code) == ("unavailable", "overloaded")
    d.engine.gate.set()
    for generation in running:
        assert [o async for o in generation]
