"""Messages of a registration that is over: late by any time, or sent once more. They find nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from cluster.relay import ControlRelay, control_relay

from server.cache.layout import PROBE_NBYTES, Run
from server.failure import Failure, RequestFailed
from tests.nodes.support import FAST, NodeUnderTest, Pair, answer, expected, pairs, request, until
from tests.transfer.support import make_geometry

IMPATIENT = replace(FAST, reserve_s=0.5, quiesce_s=0.3, commit_s=0.5)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs() as pair:
        yield pair


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


async def test_a_register_that_is_sent_once_more_does_not_end_a_later_registration(pair: Pair) -> None:
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address)
        (link,) = d.node.manager.rooms.peers.links
        link.lose(Failure("fenced", "simulated"))
        await registered_anew(d, wire, 1)
        old = next(passed for passed in wire.seen if passed.kind == "Register")
        fences = d.metric("pd_fences_total")
        for seed in range(3):
            wire.send(old)
            await all_taken(wire)
            assert await answer(d.node, request(20, seed)) == expected(request(20, seed))
        assert d.metric("pd_fences_total") == fences == 1
        assert len(wire.registers) == 2


@pytest.mark.parametrize("is_over", [False, True], ids=["current", "over"])
async def test_a_prefill_node_that_restarts_is_not_held_by_an_old_register(pair: Pair, is_over: bool) -> None:
    """It cannot know that the transport session in it is dead; the decode node's next message says so."""
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address)
        (link,) = d.node.manager.rooms.peers.links
        old = next(passed for passed in wire.seen if passed.kind == "Register")
        if is_over:
            link.lose(Failure("fenced", "simulated"))
            await registered_anew(d, wire, 1)
        before = len(wire.registers)
        port = p.node.bootstrap_port
        await p.node.socket.close()
        wire.send(old)
        again = await pair.prefill(port=port)
        await registered_anew(d, wire, before)
        await until(lambda: [peer["registration"] for peer in again.node.server_info()["peers"]] == [before + 1])
        assert await answer(d.node, request(300)) == expected(request(300))
        assert d.engine.wrong_bytes == []


async def test_a_prefill_node_that_has_given_a_registration_up_has_it_never_again(pair: Pair) -> None:
    """It lost the decode node alone; the decode node hears it from the next ``Pong``, fences, and begins another."""
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address)
        old = next(passed for passed in wire.seen if passed.kind == "Register")
        (peer,) = p.node.bootstrap.peers.values()
        p.node.bootstrap.lose(peer, Failure("peer_lost", "simulated"))
        wire.send(old)
        await registered_anew(d, wire, 1)
        assert await answer(d.node, request(20)) == expected(request(20))
        assert d.metric("pd_fences_total") == 1
        assert [peer["registration"] for peer in p.node.server_info()["peers"]] == [2]


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


async def test_messages_of_an_earlier_registration_are_counted_and_left(pair: Pair) -> None:
    """All that a decode node says in one registration, once more in the next."""
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        d = await pair.decode(wire.address)
        assert await answer(d.node, request(300)) == expected(request(300))
        assert (await d.node.ready())[0]
        p.engine.gate.clear()
        leaving = d.node.submit(request(20))
        await until(lambda: p.counts()["slots"]["reserved"] == 1)
        leaving.abort()
        await until(lambda: any(passed.kind == "Abort" for passed in wire.seen))
        p.engine.gate.set()
        (link,) = d.node.manager.rooms.peers.links
        old = [passed for passed in wire.seen if passed.kind not in ("Ping", "Register")]
        assert {passed.kind for passed in old} == {"Probe", "Reserve", "Committed", "Abort"}
        link.lose(Failure("fenced", "simulated"))
        await registered_anew(d, wire, 1)
        stale, answers = p.metric("pd_control_frames_dropped_total", reason="stale"), +wire.answers
        for passed in old:
            wire.send(passed)
        await all_taken(wire)
        assert p.metric("pd_control_frames_dropped_total", reason="stale") == stale + len(old)
        assert {kind for kind, n in wire.answers.items() if n != answers[kind]} == {"Pong"}
        assert not p.node.busy


async def test_a_registration_that_is_over_before_the_decode_node_hears_of_it_is_followed_by_another(
    pair: Pair,
) -> None:
    p = await pair.prefill()
    async with control_relay(f"127.0.0.1:{p.node.bootstrap_port}") as wire:
        wire.lose = {"Registered"}
        d = await pair.decode(wire.address, wait=False)
        await until(lambda: wire.answers["Registered"] > 0)
        (peer,) = p.node.bootstrap.peers.values()
        p.node.bootstrap.lose(peer, Failure("peer_lost", "simulated"))
        wire.lose = set()
        await registered_anew(d, wire, 1)
        assert [peer["registration"] for peer in p.node.server_info()["peers"]] == [2]
        assert await answer(d.node, request(20)) == expected(request(20))
