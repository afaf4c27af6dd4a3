"""Messages of a registration that is over: late by any time, or sent once more. They find nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster.relay import ControlRelay, control_relay

from server.cache.layout import PROBE_NBYTES, Run
from server.failure import RequestFailed
from tests.nodes.support import FAST, NodeUnderTest, Pair, expected, request
from tests.support.waiting import until
from tests.transfer.support import make_geometry

IMPATIENT = replace(FAST, reserve_s=0.5, quiesce_s=0.3, commit_s=0.5)


async def registered_anew(d: NodeUnderTest, wire: ControlRelay, before: int) -> None:
    await until(lambda: len(wire.registers) > before and d.node.server_info()["peers"][0]["state"] == "registered")


async def all_taken(wire: ControlRelay) -> None:
    """Everything that was sent to the prefill node before has been taken there: a later ``Ping`` is answered."""
    n_pings = sum(passed.kind == "Ping" for passed in wire.seen)
    await until(lambda: wire.answers["Pong"] > n_pings)


async def test_a_reserve_that_comes_after_the_next_registration_writes_nothing(pair: Pair) -> None:
    """The decode node has one slot, and pages for one such request: the next request gets the memory of the first."""
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address, deadlines=IMPATIENT, geometry=make_geometry(extra_rows=2, slots=2, pages=3))
        wire.hold, wire.lose = {"Reserve"}, {"Abort"}
        with pytest.raises(RequestFailed) as caught:
            await d.node.submit(request(300)).route()
        assert caught.value.code == "deadline"
        await registered_anew(d, wire, 1)
        assert d.metric("pd_fences_total") == 1

        wire.hold = set()
        d.engine.gate.clear()
        asked = request(290, seed=5)
        generation = d.node.submit(asked)
        await generation.route()
        await until(lambda: p.node.load()["num_reqs"] == 0)
        memory = d.arena.buffer.numpy().copy()
        stale, n_done = p.metric("pd_control_frames_dropped_total", reason="stale"), wire.answers["Done"]
        assert wire.held
        for late in wire.held:
            wire.send(late)
        await all_taken(wire)
        await until(lambda: p.node.load()["num_reqs"] == 0 or wire.answers["Done"] > n_done, what="all is written")
        assert (d.arena.buffer.numpy() == memory).all(), "the memory of another room was written"
        assert p.metric("pd_control_frames_dropped_total", reason="stale") == stale + len(wire.held)
        assert len(p.engine.prefilled) == 1
        d.engine.gate.set()
        assert [token async for output in generation for token in output.token_ids] == expected(asked)


async def test_a_probe_that_comes_once_more_is_answered_once_more_and_written_once(pair: Pair) -> None:
    """One from before the last probe is neither: its place may be another probe's by now."""
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address)
        for _ in range(2):
            d.node.manager.rooms.peers.prober.fresh_s = 0.0
            is_ready, reason = await d.node.ready()
            assert is_ready, reason
        earlier, last = (passed for passed in wire.seen if passed.kind == "Probe")
        landed = d.arena.read([Run(0, PROBE_NBYTES)])
        wire.send(last)
        await until(lambda: wire.answers["ProbeDone"] == 3)
        wire.send(earlier)
        await all_taken(wire)
        assert wire.answers["ProbeDone"] == 3
        assert d.arena.read([Run(0, PROBE_NBYTES)]) == landed
