"""What goes wrong is told at once and by name, memory comes back when it is safe, and the next request works."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from server.engine.events import Died
from server.failure import RequestFailed
from server.transfer.engines.loopback import LoopbackEngine, PieceFate, Submission
from server.transfer.frames import encode, seal
from server.transfer.protocol import Committed
from tests.nodes.support import COMPONENTS, FAST, Pair, answer, assert_works_again, expected, request
from tests.support.waiting import until
from tests.transfer.test_protocol import reserve


@pytest.mark.parametrize("component", COMPONENTS)
async def test_a_component_that_is_not_sent_fails_the_room_by_its_name(pair: Pair, component: str) -> None:
    p = await pair.prefill(faults=(f"drop:{component}:1",))
    d = await pair.decode(p)
    with pytest.raises(RequestFailed, match=component) as caught:
        await answer(d.node, request(270))
    assert (caught.value.component, caught.value.code, caught.value.kind) == (component, "component_mismatch", "peer")
    await assert_works_again(p, d)
    assert d.metric("pd_rooms_total", outcome="failed", reason="component_mismatch") == 1
    assert p.metric("pd_rooms_total", outcome="failed", reason="rejected") == 1


@pytest.mark.parametrize(
    ("fate", "code", "fences"),
    [
        (PieceFate.REFUSE, "transfer_failed", 0),
        (PieceFate.LOSE, "transfer_failed", 1),
        (PieceFate.LAND_LATE, "transfer_failed", 1),
        (PieceFate.RAISE, "transfer_failed", 1),
        (PieceFate.HANG, "transfer_failed", 1),
        (PieceFate.CORRUPT, "component_mismatch", 0),
    ],
)
async def test_a_bad_write_fails_the_room_and_its_memory_is_safe(
    pair: Pair, fate: PieceFate, code: str, fences: int
) -> None:
    engines: list[LoopbackEngine] = []
    struck: list[Submission] = []

    def strike(submission: Submission) -> PieceFate | None:
        if struck:
            return None
        struck.append(submission)
        return fate

    def transport() -> LoopbackEngine:
        engines.append(LoopbackEngine(fate_of=strike))
        return engines[-1]

    p = await pair.prefill(make_transport=transport, deadlines=replace(FAST, transfer_s=1.0))
    d = await pair.decode(p)
    with pytest.raises(RequestFailed) as caught:
        await answer(d.node, request(270))
    told = (caught.value.code, caught.value.kind)
    assert told == (code, "peer") or (fate is PieceFate.HANG and told == ("deadline", "deadline")), (
        "the room's or the sender's own"
    )
    assert any(name in caught.value.failure.reason for name in (*COMPONENTS, "pages", "deadline"))
    await assert_works_again(p, d)
    assert d.metric("pd_fences_total") == fences
    for engine in engines:
        assert engine.land_late() == 0, "the fence has closed the way"


async def test_requests_that_wait_during_a_fence_are_served_after_it(pair: Pair) -> None:
    struck = []

    def lose_one(submission: Submission) -> PieceFate | None:
        struck.append(submission)
        return PieceFate.LOSE if len(struck) == 3 else None

    p = await pair.prefill(make_transport=lambda: LoopbackEngine(fate_of=lose_one))
    d = await pair.decode(p)
    asked = [request(270, seed=i) for i in range(9)]
    results = await asyncio.gather(*(answer(d.node, one) for one in asked), return_exceptions=True)
    failed = [result for result in results if isinstance(result, RequestFailed)]
    assert 1 <= len(failed) <= 3, "only those that held a slot"
    assert {failure.code for failure in failed} <= {"transfer_failed", "fenced"}
    assert [result for result in results if not isinstance(result, RequestFailed)] == [
        expected(one) for one, result in zip(asked, results, strict=True) if not isinstance(result, RequestFailed)
    ]
    assert d.metric("pd_fences_total") == 1
    await assert_works_again(p, d)


async def test_an_exception_at_the_commit_never_frees_memory_that_the_engine_decodes_in(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    for owner, name in ((d.node.manager.rooms.peers.links[0], "send"), (d.parts.metrics, "room_ended")):
        real = getattr(owner, name)
        with monkeypatch.context() as patched:

            def broken(what: object, *args: object, real: Any = real) -> None:
                real(what, *args)
                if isinstance(what, Committed) or what == "committed":
                    raise ZeroDivisionError("simulated")

            patched.setattr(owner, name, broken)
            with pytest.raises(RequestFailed, match="ZeroDivisionError"):
                await answer(d.node, request(40, max_tokens=400))
        await assert_works_again(p, d)
        assert d.engine.wrong_bytes == []
        assert d.engine.n_decoding == 0, "nothing decodes there any more"


async def test_the_client_hears_of_a_dead_prefill_engine(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    generation = d.node.submit(request(100))
    await until(lambda: p.counts()["slots"]["reserved"] == 1)
    p.node.on_engine_event(Died("out of memory"))
    with pytest.raises(RequestFailed, match="out of memory"):
        await generation.route()
    assert p.node.alive() == (False, "the engine thread has ended: out of memory")
    with pytest.raises(RequestFailed, match="out of memory"):
        await answer(d.node, request(5))
    assert not d.node.server_info()["waiting"]


async def test_garbage_on_the_control_port_is_counted_and_dropped(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{p.node.bootstrap_port}")
    for _ in range(50):
        await socket.send(os.urandom(100))
        await socket.send(seal(os.urandom(100)))
        await socket.send(seal(os.urandom(100))[:-1])
        await socket.send_multipart([b"", b"a", b"b"])
    await socket.send(encode(reserve()))
    await socket.send(b"PD\x09hello")
    await socket.send(seal(bytes(1 << 20)))
    assert b"protocol_version" in await socket.recv()
    names = ("garbage", "corrupt", "malformed", "stale", "version")
    await until(lambda: all(p.metric("pd_control_frames_dropped_total", reason=name) > 0 for name in names))
    socket.close(0)
    context.term()
    await assert_works_again(p, d)
