"""Rooms that a router named: no memory for half a room, and an id that is used again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from cluster.relay import control_relay

from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest, RoutedRoom
from server.failure import Failure, RequestFailed
from tests.nodes.support import NodeUnderTest, Pair, answer, expected, pairs, request, until
from tests.nodes.test_routed_rooms import AT_ONCE_S, all_free, failure, fill, named, outputs, tokens

N_LONELY = 40


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs() as pair:
        yield pair


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


@pytest.mark.parametrize("lost", ["Waiting", "RequestArrived", "Failed"])
async def test_a_lost_message_about_a_waiting_room_is_made_good(pair: Pair, lost: str) -> None:
    faults = (f"drop-message:{lost}:1",)
    p = await pair.prefill(faults=() if lost == "Waiting" else faults)
    d = await pair.decode(p, faults=faults if lost == "Waiting" else ())
    asked = named(20, p)
    if lost == "Failed":
        await fill(d)
    at_d, at_p = d.node.submit(asked), p.node.submit(asked)
    if lost == "Failed":
        await until(lambda: p.node.manager.routed_rooms.have_met(7))
        at_p.abort()
        with pytest.raises(RequestFailed) as caught:
            await at_d.route()
        assert caught.value.code == "prefill_client_gone"
        d.engine.gate.set()
    else:
        assert tokens(await outputs(at_d)) == expected(asked)
        assert tokens(await outputs(at_p)) == expected(asked)[:1]
    await all_free(p, d)


@pytest.mark.parametrize("waits_for", ["its request", "memory"])
async def test_a_waiting_room_outlives_the_registration_that_it_was_told_in(pair: Pair, waits_for: str) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    if waits_for == "memory":
        await fill(d)
    asked = named(20, p)
    at_d = d.node.submit(asked)
    at_p = p.node.submit(asked) if waits_for == "memory" else None
    await until(lambda: n_unpaired(p) == 1 if at_p is None else p.node.manager.routed_rooms.have_met(7))
    (link,) = d.node.manager.rooms.peers.links
    link.lose(Failure("fenced", "simulated"))
    await until(lambda: [peer["registration"] for peer in p.node.server_info()["peers"]] == [2])
    at_p = at_p or p.node.submit(asked)
    d.engine.gate.set()
    assert tokens(await outputs(at_d)) == expected(asked)
    assert tokens(await outputs(at_p)) == expected(asked)[:1]
    await all_free(p, d)


async def use_once(p: NodeUnderTest, d: NodeUnderTest, first: str, asked: GenerationRequest) -> bool:
    """One try of a client: the halves, the ``first`` one known to the prefill node before the other. Was it answered?

    As soon as one half fails the other is closed.
    """
    halves: dict[str, NodeGeneration] = {}
    await until(lambda: d.node.load()["num_reqs"] == 0, what="the id is in use on the decode node")
    try:
        for side in (first, "decode" if first == "prefill" else "prefill"):
            halves[side] = (p if side == "prefill" else d).node.submit(asked)
            if side == first == "decode":
                await until(lambda: n_unpaired(p) == 1 or halves["decode"].ended)
        for side, generation in halves.items():
            assert tokens(await outputs(generation)) == expected(asked)[: 1 if side == "prefill" else None]
    except RequestFailed:
        for generation in halves.values():
            generation.abort()
        await until(lambda: p.node.load()["num_reqs"] == d.node.load()["num_reqs"] == n_unpaired(p) == 0)
        return False
    return True


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("died", ["prefill", "decode"])
async def test_an_id_can_be_used_again_after_one_half_has_died_alone(pair: Pair, died: str, first: str) -> None:
    """One try may still be taken for the other half of the dead one."""
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = named(20, p)
    half = (p if died == "prefill" else d).node.submit(asked)
    if died == "decode":
        await until(lambda: n_unpaired(p) == 1)
    half.abort()
    await until(lambda: n_unpaired(p) == p.node.load()["num_reqs"] == 0)
    is_mistaken = died != first
    tries = [await use_once(p, d, first, asked) for _ in range(3)]
    assert tries[1:] == [True, True]
    assert tries[0] or is_mistaken
    await all_free(p, d)


async def test_an_id_can_be_used_again_at_once_after_both_halves_are_over(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = named(20, p)
    p.engine.gate.clear()
    at_d, at_p = d.node.submit(asked), p.node.submit(asked)
    await until(lambda: p.counts()["slots"]["reserved"] == 1)
    at_p.abort()
    with pytest.raises(RequestFailed):
        await at_d.route()
    p.engine.gate.set()
    for first in ("prefill", "decode") * 5:
        assert await use_once(p, d, first, asked)
    await all_free(p, d)


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
