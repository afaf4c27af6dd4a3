"""A peer that is killed is known by its broken connection, long before it could be called silent.

The other side's ``peer_s`` is a minute here: nothing but the broken connection can tell it in time.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from server.failure import RequestFailed
from server.transfer.engines.mooncake import MooncakeEngine
from tests.nodes.processes import DecodeProcess, PrefillProcess
from tests.nodes.support import FAST, Pair, all_free, answer, assert_works_again, expected, pairs, phase_is, request
from tests.support.waiting import until

PATIENT = replace(FAST, peer_s=60.0, probe_s=60.0, prefill_s=60.0, reserve_s=60.0)
AT_ONCE_S = 30.0
"""On a machine of any speed, and less than any deadline; a tenth of a second on a quiet one."""


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs(lambda: MooncakeEngine(transport="tcp")) as pair:
        yield pair


async def test_a_killed_prefill_node_is_known_at_once(pair: Pair, start_prefill: Callable[..., PrefillProcess]) -> None:
    p = start_prefill(chunk_delay_s=1.0)
    d = await pair.decode(p.address, deadlines=PATIENT)
    assert (await d.node.ready())[0]
    generation = d.node.submit(request(1000))
    await phase_is(d, "prefill")
    async with asyncio.timeout(AT_ONCE_S):
        p.signal(signal.SIGKILL)
        with pytest.raises(RequestFailed, match="nobody listens at") as caught:
            await generation.route()
        assert (caught.value.code, caught.value.kind) == ("peer_lost", "peer")
        ready, reason = await d.node.ready()
        assert not ready
        assert "nobody listens at" in reason
        with pytest.raises(RequestFailed, match="nobody listens at") as caught:
            await d.node.submit(request(5)).route()
        assert (caught.value.code, caught.value.kind) == ("no_prefill", "unavailable")
    await until(lambda: all_free(d), what="the fence makes the memory free")
    p = start_prefill(p.port)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    assert await answer(d.node, request(270)) == expected(request(270))

    p.signal(signal.SIGSTOP)
    asking = asyncio.create_task(d.node.ready())
    await until(lambda: d.node.manager.rooms.peers.prober.n_waiting > 0, what="a readiness probe is under way")
    p.signal(signal.SIGKILL)
    ready, reason = await asyncio.wait_for(asking, AT_ONCE_S)
    assert not ready
    assert "nobody listens at" in reason


async def test_the_rooms_of_a_killed_prefill_node_go_to_another_at_once(
    pair: Pair, start_prefill: Callable[..., PrefillProcess]
) -> None:
    killed = start_prefill(chunk_delay_s=1.0)
    other = await pair.prefill()
    d = await pair.decode(killed.address, other, deadlines=PATIENT)
    generation = d.node.submit(request(1000))  # the first of two that are as free
    await phase_is(d, "prefill")
    async with asyncio.timeout(AT_ONCE_S):
        killed.signal(signal.SIGKILL)
        route = await generation.route()
    assert (route.prefill, route.n_retries) == (f"127.0.0.1:{other.node.bootstrap_port}", 1)
    assert [t async for output in generation for t in output.token_ids] == expected(request(1000))


async def test_a_killed_decode_node_is_known_at_once(pair: Pair, start_decode: Callable[..., DecodeProcess]) -> None:
    p = await pair.prefill(deadlines=PATIENT)
    d = start_decode(f"127.0.0.1:{p.node.bootstrap_port}")
    assert (await d.hear()).startswith("ready")
    p.engine.gate.clear()
    d.say("ask 1500 1")
    await until(lambda: p.counts()["slots"]["reserved"] == 1, what="P works on the room")
    d.end()
    await until(lambda: not p.node.bootstrap.peers, AT_ONCE_S, "P has given the dead node up")
    p.engine.gate.set()
    await until(lambda: all_free(p) and not p.node.manager.senders, what="P's memory is free")


async def test_a_connection_that_is_reset_between_two_living_nodes_loses_no_room(pair: Pair) -> None:
    """By something between them; both look whether the other is there still."""
    p = await pair.prefill(deadlines=PATIENT)
    writers: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", p.node.bootstrap_port)
        writers.extend((writer, back))
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
        d = await pair.decode(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", deadlines=PATIENT)
        p.engine.gate.clear()
        generation = d.node.submit(request(300))
        await phase_is(d, "prefill")
        (link,) = d.node.manager.rooms.peers.links
        for _ in range(3):
            await until(lambda: link.dialer.connected)
            n_before = len(writers)
            for writer in writers:
                writer.transport.abort()
            await until(lambda n=n_before: len(writers) > n + 1)  # type: ignore[misc]
        p.engine.gate.set()
        assert [t async for output in generation for t in output.token_ids] == expected(request(300))
        assert d.metric("pd_fences_total") == 0
        assert d.metric("pd_retries_total", reason="peer_lost") == 0
        await assert_works_again(p, d)
        await pair.stop(d)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
