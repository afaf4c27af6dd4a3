"""How a node ends: drained when it is told to, at once and by name when a part of it dies; one room never ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from server.decode.room import DecodeRoom
from server.failure import RequestFailed
from server.prefill.kv_sender import SendJob
from server.transfer.engines.base import EngineClosed, TransferError
from server.transfer.engines.loopback import LoopbackEngine, PieceFate
from server.transfer.protocol import Done
from tests.nodes.support import FAST, NodeUnderTest, Pair, all_free, answer, assert_works_again, expected, request
from tests.support.http import http_server
from tests.support.waiting import until
from tests.transfer.support import make_geometry


class Bug(BaseException):
    """What no handler of a node catches."""


def raise_bug(*args: object) -> None:
    raise Bug("simulated")


class _Deadly:
    """A key that ends whoever looks it up."""

    def __hash__(self) -> int:
        raise Bug("simulated")


# --- the end that was asked for ---


async def test_a_decode_node_that_drains_finishes_what_has_begun(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, geometry=make_geometry(slots=3, extra_rows=2))
    p.engine.gate.clear()
    begun = [d.node.submit(request(270, seed=i)) for i in range(2)]
    waiting = d.node.submit(request(30))
    d.node.drain()
    with pytest.raises(RequestFailed, match="decode node is shutting down") as caught:
        await waiting.route()
    assert (caught.value.kind, caught.value.code) == ("unavailable", "shutting_down")
    with pytest.raises(RequestFailed, match="shutting down"):
        d.node.submit(request(5))
    assert await d.node.ready() == (False, "the decode node is shutting down")
    assert d.node.alive() == (True, "")
    assert d.node.busy
    p.engine.gate.set()
    for i, generation in enumerate(begun):
        assert [t async for o in generation for t in o.token_ids] == expected(request(270, seed=i))
    assert not d.node.busy


async def test_a_prefill_node_that_drains_finishes_its_transfers_and_refuses_new_rooms_by_name(pair: Pair) -> None:
    p = await pair.prefill(geometry=make_geometry(slots=2))
    d = await pair.decode(p)
    p.engine.gate.clear()
    begun, queued = d.node.submit(request(300)), d.node.submit(request(301))
    await until(lambda: p.node.server_info()["waiting"] == 1)
    p.node.drain()
    for failing in (queued, d.node.submit(request(20))):
        with pytest.raises(RequestFailed, match="prefill node is shutting down") as caught:
            await failing.route()
        assert (caught.value.kind, caught.value.code) == ("unavailable", "shutting_down")
    assert await p.node.ready() == (False, "the prefill node is shutting down")
    ready, reason = await d.node.ready()
    assert not ready
    assert "the prefill node is shutting down" in reason
    assert p.node.busy
    p.engine.gate.set()
    assert [t async for o in begun for t in o.token_ids] == expected(request(300))
    assert d.engine.wrong_bytes == []
    await until(lambda: not p.node.busy)
    await until(lambda: all_free(p) and all_free(d))


async def test_what_a_drain_refuses_is_served_by_another_prefill_node(pair: Pair) -> None:
    first, second = await pair.prefill(), await pair.prefill()
    d = await pair.decode(first, second)
    first.node.drain()
    for seed in range(4):
        assert await answer(d.node, request(40, seed=seed)) == expected(request(40, seed=seed))
    assert first.engine.prefilled == []
    assert d.metric("pd_retries_total", reason="shutting_down") == 1, "then the other one is asked first"


async def test_a_node_ends_although_a_transport_session_cannot_be_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = await pair.prefill(), await pair.prefill()
    d = await pair.decode(stuck, other)
    first, second = d.node.manager.rooms.peers.sessions.engines.values()

    def in_use() -> None:
        raise TransferError("another thread is using its engine")

    monkeypatch.setattr(first, "close", in_use)
    await pair.stop(d)
    with pytest.raises(EngineClosed):
        second.submit(first.session, d.arena.ptr, d.arena.ptr, 1)


# --- the end that nobody asked for ---

VITAL: dict[str, Callable[[NodeUnderTest, NodeUnderTest, pytest.MonkeyPatch], NodeUnderTest]] = {}
"""By the words of the reason: breaks a part and says whose it was."""


def vital(words: str) -> Callable[[Callable[..., NodeUnderTest]], Callable[..., NodeUnderTest]]:
    def register(kill: Callable[..., NodeUnderTest]) -> Callable[..., NodeUnderTest]:
        VITAL[words] = kill
        return kill

    return register


@vital("decode ticker")
def _(p: NodeUnderTest, d: NodeUnderTest, patch: pytest.MonkeyPatch) -> NodeUnderTest:
    patch.setattr(d.node.manager, "tick", raise_bug)
    return d


@vital("prefill ticker")
def _(p: NodeUnderTest, d: NodeUnderTest, patch: pytest.MonkeyPatch) -> NodeUnderTest:
    patch.setattr(p.node.manager, "tick", raise_bug)
    return p


@vital("bootstrap receive")
def _(p: NodeUnderTest, d: NodeUnderTest, patch: pytest.MonkeyPatch) -> NodeUnderTest:
    patch.setattr(p.node.bootstrap, "on_frames", raise_bug)
    return p


@vital("bootstrap watch")
def _(p: NodeUnderTest, d: NodeUnderTest, patch: pytest.MonkeyPatch) -> NodeUnderTest:
    (peer,) = p.node.manager.senders
    patch.setattr(peer.heartbeat, "tick", raise_bug)
    return p


@vital("peer 127.0.0.1")
def _(p: NodeUnderTest, d: NodeUnderTest, patch: pytest.MonkeyPatch) -> NodeUnderTest:
    patch.setattr(d.node.manager.rooms.peers.links[0].dialer, "send", raise_bug)
    return d


@vital("receive 127.0.0.1")
def _(p: NodeUnderTest, d: NodeUnderTest, patch: pytest.MonkeyPatch) -> NodeUnderTest:
    patch.setattr(d.parts.metrics, "received", raise_bug)
    return d


@vital("sender ")
def _(p: NodeUnderTest, d: NodeUnderTest, patch: pytest.MonkeyPatch) -> NodeUnderTest:
    (sender,) = p.node.manager.senders.values()
    sender.send(SendJob(_Deadly(), 0, (), 0.0))
    return p


@pytest.mark.parametrize("words", VITAL)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_vital_part_that_dies_is_told_by_health_with_its_name(
    pair: Pair, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    assert p.node.alive() == d.node.alive() == (True, "")
    broken = VITAL[words](p, d, monkeypatch)
    await until(lambda: not broken.node.alive()[0], what=words)
    assert words in broken.node.alive()[1]
    async with http_server(broken.node, broken.parts.metrics.registry) as url, httpx.AsyncClient() as client:
        for path in ("/health", "/ready"):
            refused = await client.get(url + path)
            assert refused.status_code == 503
            assert words in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
    monkeypatch.undo()


async def test_a_node_that_dies_tells_its_clients_why(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    generation = d.node.submit(request(300))
    monkeypatch.setattr(d.node.manager, "tick", raise_bug)
    await until(lambda: not d.node.alive()[0])
    await d.node.stop()
    with pytest.raises(RequestFailed, match="decode ticker") as caught:
        await generation.route()
    assert (caught.value.kind, caught.value.code) == ("unavailable", "node_died")
    assert not d.node.alive()[0], "also after the end"


# --- one room ---


@pytest.mark.parametrize(
    "target",
    [
        "server.decode.room_manager.DecodeRoomManager.open",
        "server.decode.room_manager.verify",
        "server.faults.hooks.Hooks.received",
        "the decode node's metrics.transferred",
        "the decode node's allocator.commit",
        "server.engine.generation.NodeGeneration.put",
        "server.decode.room.DecodeRoom.handle",
        "server.prefill.room_manager.read_request",
        "server.prefill.room_memory.RoomMemory.refuses",
        "server.prefill.room_memory.Outgoing",
        "server.prefill.request.CopyPlan.full_pages",
        "server.prefill.request.CopyPlan.tail",
    ],
)
async def test_an_exception_anywhere_in_a_room_fails_that_room_only(
    pair: Pair, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    d.engine.gate.clear()
    bystander = aiter(d.node.submit(request(600, seed=1)))
    tokens = list((await anext(bystander)).token_ids)
    with monkeypatch.context() as patched:

        def broken(*args: Any, handle: Any = DecodeRoom.handle, **kwargs: object) -> object:
            if target.endswith("DecodeRoom.handle") and not isinstance(args[1], Done):
                return handle(*args)
            raise ZeroDivisionError("simulated")

        if target.startswith("the decode node's "):
            owner, name = target.rsplit(" ", maxsplit=1)[-1].split(".")
            patched.setattr(getattr(d.parts, owner), name, broken)
        else:
            patched.setattr(target, broken)
        with pytest.raises(RequestFailed, match="ZeroDivisionError") as caught:
            await asyncio.wait_for(answer(d.node, request(600, seed=2)), 60.0)
        assert (caught.value.code, caught.value.kind) == ("internal_error", "internal")
    d.engine.gate.set()
    tokens += [token async for output in bystander for token in output.token_ids]
    assert tokens == expected(request(600, seed=1))
    await assert_works_again(p, d)
    assert not d.node.manager.reqs
    await until(lambda: not p.node.manager.reqs)
    assert p.node.alive() == d.node.alive() == (True, "")


async def test_peers_that_register_and_die_leave_nothing(pair: Pair) -> None:
    p = await pair.prefill()
    survivor = await pair.decode(p)
    for _ in range(3):
        d = await pair.decode(p)
        for link in d.node.manager.rooms.peers.links:
            await link.close()  # as a killed process: it says nothing any more
        pair.started.remove(d)
        d.engine.gate.set()
        await d.node.stop()
    await until(lambda: len(p.node.manager.senders) == 1, FAST.peer_s + 2.0)
    assert await answer(survivor.node, request(270)) == expected(request(270))
    await until(lambda: all_free(p) and all_free(survivor))
    senders = [thread for thread in threading.enumerate() if thread.name.startswith("sender ")]
    assert len(senders) == 1


# --- quarantine ---


async def test_memory_in_quarantine_is_told_with_its_age_and_its_cause(pair: Pair) -> None:
    engines: list[LoopbackEngine] = []

    def transport() -> LoopbackEngine:
        engines.append(LoopbackEngine(fate_of=lambda submission: PieceFate.HANG))
        return engines[-1]

    p = await pair.prefill(make_transport=transport)
    d = await pair.decode(p, deadlines=replace(FAST, quiesce_s=20.0))
    assert d.node.server_info()["quarantine"] == []
    generation = d.node.submit(request(300))
    (req,) = d.node.manager.reqs.values()
    await until(lambda: req.room is not None and req.room.phase == "transfer")
    generation.abort()
    await until(lambda: d.counts()["slots"]["quarantined"] == 1)
    (told,) = d.node.server_info()["quarantine"]
    assert told["room"] == str(req.key.room)
    assert told["prefill"] == f"127.0.0.1:{p.node.bootstrap_port}"
    assert told["reason"] == "the client aborted the request"
    before = d.metric("pd_quarantine_oldest_seconds")
    await until(lambda: d.metric("pd_quarantine_oldest_seconds") > before)
    for engine in engines:
        engine.release()
    await until(lambda: d.node.server_info()["quarantine"] == [])
    assert d.metric("pd_quarantine_oldest_seconds") == 0
