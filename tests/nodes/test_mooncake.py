"""The same nodes over real Mooncake, in one process and with a prefill node that is killed or frozen."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest

from server.failure import RequestFailed
from server.transfer.engines.mooncake import MooncakeEngine
from tests.nodes.processes import PrefillProcess
from tests.nodes.support import FAST, Pair, all_free, answer, assert_works_again, expected, pairs, phase_is, request
from tests.support.waiting import until


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs(lambda: MooncakeEngine(transport="tcp")) as pair:
        yield pair


async def test_every_live_byte_arrives(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    ready, reason = await d.node.ready()
    assert ready, reason
    for n in (1, 18, 128, 257, 1025):
        assert await answer(d.node, request(n)) == expected(request(n))
    assert d.engine.wrong_bytes == []
    asked = [request(1 + 37 * i % 600, seed=i) for i in range(16)]
    assert await asyncio.gather(*(answer(d.node, one) for one in asked)) == [expected(one) for one in asked]
    assert d.engine.wrong_bytes == []
    await until(lambda: all_free(p) and all_free(d))


@pytest.mark.parametrize("component", ["c4_kv", "swa"])
async def test_a_component_that_is_not_sent_fails_the_room_by_its_name(pair: Pair, component: str) -> None:
    p = await pair.prefill(faults=(f"drop:{component}:1",))
    d = await pair.decode(p)
    with pytest.raises(RequestFailed, match=component) as caught:
        await answer(d.node, request(270))
    assert caught.value.component == component
    await assert_works_again(p, d)


async def test_aborts_at_any_moment_leave_every_count_at_its_start(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    await answer(d.node, request(5))
    for i in range(40):
        generation = d.node.submit(request(500, seed=i, max_tokens=50))
        await asyncio.sleep(0.002 * i)
        generation.abort()
    await assert_works_again(p, d)
    assert d.metric("pd_fences_total") == 0


async def test_writes_are_refused_once_the_arena_is_unregistered_and_the_room_says_so(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    address = f"127.0.0.1:{p.node.bootstrap_port}"
    d.node.manager.rooms.peers.sessions.engines[address].unregister(d.arena.ptr)
    with pytest.raises(RequestFailed, match="refused") as caught:
        await answer(d.node, request(100))
    assert caught.value.code == "transfer_failed"
    await until(lambda: all_free(p) and all_free(d))


async def test_a_decode_node_restart_gets_a_fresh_sender(pair: Pair) -> None:
    p = await pair.prefill()
    for _ in range(2):
        d = await pair.decode(p)
        assert await answer(d.node, request(300)) == expected(request(300))
        await pair.stop(d)
    await until(lambda: not p.node.manager.senders, 5.0)
    assert all_free(p)


async def test_a_killed_prefill_node_fails_its_rooms_and_the_next_one_serves(
    pair: Pair, start_prefill: Callable[..., PrefillProcess]
) -> None:
    p = start_prefill(chunk_delay_s=0.3)
    d = await pair.decode(p.address)
    generation = d.node.submit(request(1000))
    await phase_is(d, "prefill")
    await asyncio.sleep(0.5)  # some pages are on their way
    started = time.monotonic()
    p.signal(signal.SIGKILL)
    with pytest.raises(RequestFailed, match="is gone: nobody listens at"):
        await generation.route()
    assert time.monotonic() - started < 5 * FAST.peer_s
    await until(lambda: all_free(d), what="the fence makes the memory free")
    start_prefill(p.port)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    assert await answer(d.node, request(270)) == expected(request(270))
    assert d.engine.wrong_bytes == []


async def test_a_frozen_prefill_node_is_fenced_and_nothing_lands_when_it_wakes(
    pair: Pair, start_prefill: Callable[..., PrefillProcess]
) -> None:
    p = start_prefill(chunk_delay_s=1.0)
    d = await pair.decode(p.address)
    generation = d.node.submit(request(1000))
    await phase_is(d, "prefill")
    await asyncio.sleep(0.5)
    p.signal(signal.SIGSTOP)
    with pytest.raises(RequestFailed, match="was silent"):
        await generation.route()
    await until(lambda: all_free(d), what="the fence makes the memory free")
    before = d.arena.buffer.clone()
    p.signal(signal.SIGCONT)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    await asyncio.sleep(0.5)
    assert d.arena.buffer.equal(before), "bytes landed in memory that was free"
    assert await answer(d.node, request(270)) == expected(request(270))
    assert d.engine.wrong_bytes == []
