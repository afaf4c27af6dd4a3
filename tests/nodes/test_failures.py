"""What goes wrong is told at once and by name, memory comes back when it is safe, and the next request works."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from server.decode import room_manager
from server.decode.verify import verify
from server.engine.events import Died
from server.engine.request import FinishReason
from server.failure import RequestFailed
from server.transfer.engines.loopback import LoopbackEngine, PieceFate, Submission
from server.transfer.protocol import Committed, encode, seal
from tests.nodes.support import FAST, NodeUnderTest, Pair, answer, expected, pairs, request, until
from tests.transfer.support import make_geometry
from tests.transfer.test_protocol import reserve

COMPONENTS = [spec.name for spec in make_geometry().components]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs() as pair:
        yield pair


async def assert_works_again(p: NodeUnderTest, d: NodeUnderTest, n: int = 270) -> None:
    """All memory is free and a new request is right."""
    await until(lambda: all_free(p) and all_free(d), what=f"{p.counts()} {d.counts()}")
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    assert await answer(d.node, request(n, seed=77)) == expected(request(n, seed=77))
    assert d.engine.wrong_bytes == []
    await until(lambda: all_free(p) and all_free(d))


def all_free(side: NodeUnderTest) -> bool:
    return all(n == 0 for kind in side.counts().values() for state, n in kind.items() if state != "free")


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


@pytest.mark.parametrize("phase", ["waiting", "queued", "prefill", "transfer", "verify", "decoding"])
async def test_an_abort_in_any_phase_leaves_every_count_at_its_start(
    pair: Pair, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[LoopbackEngine] = []

    def transport() -> LoopbackEngine:
        hook = (lambda submission: PieceFate.HANG) if phase == "transfer" else None
        engines.append(LoopbackEngine(fate_of=hook))
        return engines[-1]

    p = await pair.prefill(geometry=make_geometry(slots=2), make_transport=transport)
    d = await pair.decode(p, deadlines=replace(FAST, quiesce_s=20.0))
    occupants = []
    if phase == "waiting":
        d.engine.gate.clear()
        occupants = [d.node.submit(request(9, seed=i)) for i in range(3)]
    elif phase in ("queued", "prefill"):
        p.engine.gate.clear()
        occupants = [d.node.submit(request(9))] if phase == "queued" else []
    elif phase == "verify":

        def slow_verify(*args: object) -> object:
            time.sleep(0.3)
            return verify(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(room_manager, "verify", slow_verify)
    generation = d.node.submit(request(300, seed=5, max_tokens=400))
    req = next(req for req in d.node.manager.reqs.values() if req.generation is generation)
    if phase == "waiting":
        assert req in d.node.manager.queue
    elif phase == "decoding":
        await generation.route()
    else:
        await until(lambda: req.room is not None and req.room.phase == phase, what=phase)
    generation.abort()
    generation.abort()
    outputs = [o async for o in generation]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    if phase != "decoding":
        with pytest.raises(RequestFailed, match="aborted"):
            await generation.route()
    if phase == "transfer":
        await asyncio.sleep(0.2)
        assert d.counts()["slots"]["quarantined"] == 1, "a hanging write may still land"
        for engine in engines:
            engine.release()
    p.engine.gate.set()
    d.engine.gate.set()
    for occupant in occupants:
        assert [o async for o in occupant]
    await assert_works_again(p, d)
    assert d.metric("pd_fences_total") == 0


async def test_aborting_a_hundred_rooms_leaks_nothing(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    generations = []
    for i in range(100):
        generations.append(d.node.submit(request(30 + i * 3, seed=i, max_tokens=200)))
        await asyncio.sleep(0.002 * (i % 7))
        generations[i // 2].abort()
    for generation in generations:
        generation.abort()
    await assert_works_again(p, d)
    assert not d.node.manager.reqs
    assert not p.node.manager.reqs


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


async def test_an_engine_error_fails_one_room_only(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    p.engine.fail_next = True
    first, second = d.node.submit(request(40)), d.node.submit(request(41))
    p.engine.gate.set()
    with pytest.raises(RequestFailed, match="told to fail"):
        await first.route()
    assert [t async for o in second for t in o.token_ids] == expected(request(41))
    await assert_works_again(p, d)


async def test_an_exception_in_one_room_fails_that_room_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    for target in ("server.decode.room_manager.verify", "server.prefill.request.CopyPlan.tail"):
        with monkeypatch.context() as patched:

            def broken(*args: object) -> None:
                raise ZeroDivisionError("simulated")

            patched.setattr(target, broken)
            with pytest.raises(RequestFailed, match="ZeroDivisionError") as caught:
                await answer(d.node, request(40))
            assert (caught.value.code, caught.value.kind) == ("internal_error", "internal")
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


async def test_a_peer_that_falls_silent_fails_its_rooms_within_the_deadline_and_serves_again(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    port = p.node.bootstrap_port
    p.engine.gate.clear()
    generation = d.node.submit(request(300))
    await until(lambda: next(iter(d.node.manager.reqs.values())).room.phase == "prefill")
    started = time.monotonic()
    p.node.socket.send = lambda routing_id, message: (
        None
    )  # as a frozen process: the connection stands, and says nothing
    with pytest.raises(RequestFailed, match="was silent") as caught:
        await generation.route()
    assert time.monotonic() - started < 5 * FAST.peer_s
    assert (caught.value.code, caught.value.kind) == ("peer_lost", "peer")
    with pytest.raises(RequestFailed, match="was silent") as caught:
        d.node.submit(request(5))
    assert caught.value.kind == "unavailable"
    await until(lambda: all_free(d), what="the fence makes the memory free")
    p.engine.gate.set()
    await p.node.socket.close()
    p2 = await pair.prefill(port=port)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered")
    await assert_works_again(p2, d)


async def test_a_restart_on_the_same_port_is_noticed_by_the_incarnation(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    assert await answer(d.node, request(20)) == expected(request(20))
    port = p.node.bootstrap_port
    await pair.stop(p)
    p2 = await pair.prefill(port=port)
    incarnation = p2.node.incarnation
    await until(lambda: d.node.server_info()["peers"][0]["incarnation"] == incarnation)
    await assert_works_again(p2, d)


async def test_a_prefill_node_that_shuts_down_tells_its_rooms_at_once(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    generation = d.node.submit(request(300))
    await until(lambda: next(iter(d.node.manager.reqs.values())).room.phase == "prefill")
    stopping = asyncio.create_task(pair.stop(p))
    with pytest.raises(RequestFailed, match="prefill node is shutting down"):
        await generation.route()
    await stopping


async def test_a_decode_node_that_disappears_leaves_the_prefill_node_clean(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    for i in range(3):
        d.node.submit(request(100, seed=i))
    await until(lambda: p.counts()["slots"]["reserved"] == 3)
    for link in d.node.manager.rooms.peers.links:
        await link.close()
    await until(lambda: not p.node.manager.senders, FAST.peer_s + 1.0)
    p.engine.gate.set()
    await until(lambda: all_free(p))
    assert not p.node.manager.reqs


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


async def test_a_done_that_is_sent_again_is_answered_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    answers = 0
    step = p.node.manager.step

    def lose_the_first_answer(work: object, event: object) -> None:
        nonlocal answers
        answers += isinstance(event, Committed)
        if not (isinstance(event, Committed) and answers == 1):
            step(work, event)

    monkeypatch.setattr(p.node.manager, "step", lose_the_first_answer)
    assert await answer(d.node, request(40)) == expected(request(40))
    await until(lambda: answers == 2)
    await assert_works_again(p, d)


async def test_a_control_connection_that_breaks_and_comes_back_loses_no_room(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    generation = d.node.submit(request(300))
    await until(lambda: next(iter(d.node.manager.reqs.values())).room.phase == "prefill")
    link = d.node.manager.rooms.peers.links[0]
    link.dialer.socket.disconnect(f"tcp://{link.address}")
    await asyncio.sleep(0.3)
    link.dialer.socket.connect(f"tcp://{link.address}")
    p.engine.gate.set()
    assert [t async for o in generation for t in o.token_ids] == expected(request(300))
    assert d.metric("pd_fences_total") == 0
    await assert_works_again(p, d)
