"""A phase that stays silent for longer than its deadline ends the room, and the client is told the phase and both
numbers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from server.decode import room_manager
from server.decode.verify import verify
from server.failure import RequestFailed
from server.transfer.engines.loopback import LoopbackEngine, PieceFate
from server.transfer.protocol import Committed, Reserve
from tests.nodes.support import FAST, NodeUnderTest, Pair, answer, deaf_to, pairs, request, until
from tests.nodes.test_failures import assert_works_again
from tests.transfer.support import make_geometry


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs() as pair:
        yield pair


async def failure_of(d: NodeUnderTest) -> RequestFailed:
    started = time.monotonic()
    with pytest.raises(RequestFailed) as caught:
        await answer(d.node, request(270))
    assert time.monotonic() - started < 25.0
    return caught.value


async def test_reserve(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, deadlines=replace(FAST, reserve_s=0.5))
    deaf_to(p, Reserve, monkeypatch)
    failure = await failure_of(d)
    assert (failure.kind, failure.code) == ("deadline", "deadline")
    assert "no sign of life in phase reserve for " in failure.failure.reason
    assert "(deadline 0.5 s)" in failure.failure.reason
    monkeypatch.undo()
    await assert_works_again(p, d)


async def test_queued_and_prefill(pair: Pair) -> None:
    p = await pair.prefill(geometry=make_geometry(slots=2), deadlines=replace(FAST, queued_s=0.5, prefill_s=4.0))
    d = await pair.decode(p)
    p.engine.gate.clear()
    prefilling = d.node.submit(request(300))
    await until(lambda: p.counts()["slots"]["reserved"] == 1)
    assert "phase queued on the prefill node: nothing moved for " in (await failure_of(d)).failure.reason
    with pytest.raises(RequestFailed, match=r"phase prefill on the prefill node: .* \(deadline 4 s\)") as caught:
        await prefilling.route()
    assert caught.value.kind == "deadline"
    p.engine.gate.set()
    await assert_works_again(p, d)


async def test_a_prefill_node_that_lives_but_says_nothing_of_the_room(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, deadlines=replace(FAST, prefill_s=0.6))
    p.engine.gate.clear()
    monkeypatch.setattr("server.prefill.room.PrefillRoom._on_tick", lambda *args: [])
    failure = await failure_of(d)
    assert failure.kind == "deadline"
    assert "no sign of life in phase prefill" in failure.failure.reason
    monkeypatch.undo()
    p.engine.gate.set()
    await assert_works_again(p, d)


async def test_transfer(pair: Pair) -> None:
    struck = []

    def hang_once(submission: object) -> PieceFate | None:
        struck.append(submission)
        return PieceFate.HANG if len(struck) == 1 else None

    p = await pair.prefill(
        make_transport=lambda: LoopbackEngine(fate_of=hang_once), deadlines=replace(FAST, transfer_s=0.5)
    )
    d = await pair.decode(p)
    failure = await failure_of(d)
    if failure.code == "transfer_failed":
        assert failure.kind == "peer"
        assert "the deadline passed after " in failure.failure.reason
    else:  # the room's own deadline has the same length, and was seen first
        assert failure.kind == "deadline"
        assert "phase transfer on the prefill node" in failure.failure.reason
    await assert_works_again(p, d)


async def test_commit_on_either_node(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = await pair.prefill(deadlines=replace(FAST, commit_s=0.5))
    d = await pair.decode(p, deadlines=replace(FAST, commit_s=0.3))

    def slow_verify(*args: object) -> object:
        time.sleep(0.8)
        return verify(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(room_manager, "verify", slow_verify)
    failure = await failure_of(d)
    assert failure.kind == "deadline"
    assert "no sign of life in phase commit for 0." in failure.failure.reason
    monkeypatch.undo()
    await assert_works_again(p, d)
    deaf_to(p, Committed, monkeypatch)
    assert await answer(d.node, request(270)), "the decode node has all that it needs"
    await until(lambda: p.metric("pd_rooms_total", outcome="failed", reason="deadline") == 1)
    monkeypatch.undo()
    await assert_works_again(p, d)
