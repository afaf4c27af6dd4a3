"""What Mooncake does behind a failure, met by whole nodes: a full queue, a bad address, a frozen peer, a restart on the
same port. No byte lands in memory that is free, and the next request is right.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from server.cache.layout import PROBE_NBYTES
from server.failure import RequestFailed
from server.prefill.kv_sender import MAX_PIECES_IN_FLIGHT
from server.prefill.request import PrefillRequest
from server.transfer.engines.base import Ticket
from server.transfer.engines.mooncake import MooncakeEngine
from server.transfer.rooms import Deadlines
from tests.nodes.processes import DecodeProcess
from tests.nodes.support import (
    FAST,
    NodeUnderTest,
    Pair,
    all_free,
    answer,
    assert_works_again,
    expected,
    pairs,
    request,
)
from tests.support.waiting import until
from tests.transfer.support import make_geometry

NOWHERE = 1 << 40
"""No process has memory there."""
QUEUE = 2048
"""Pieces that Mooncake's TCP transport queues; one more and a batch fails, and most of it is written all the same."""
PATIENT = Deadlines(peer_s=60.0, transfer_s=60.0)
"""For many bytes on a busy machine."""
WATCHED_S = 0.7
RECOVERS_S = 2.0
MARGIN = 4
"""For a busy machine."""


class SpyingEngine(MooncakeEngine):
    """Counts what is in flight; ``redirect`` may send a piece elsewhere."""

    redirect: Callable[[int], int] = staticmethod(lambda dst: dst)
    submitted = 0
    most_in_flight = 0

    def submit(self, session: str, src: int, dst: int, nbytes: int) -> Ticket:
        ticket = super().submit(session, src, type(self).redirect(dst), nbytes)
        SpyingEngine.submitted += 1
        SpyingEngine.most_in_flight = max(self.most_in_flight, len(self._writes))
        return ticket


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    for name, value in (("submitted", 0), ("most_in_flight", 0)):
        monkeypatch.setattr(SpyingEngine, name, value)
    async with pairs(lambda: SpyingEngine(transport="tcp")) as pair:
        yield pair


def reqs(p: NodeUnderTest) -> list[PrefillRequest]:
    return list(p.node.manager.reqs.values())


async def stays_free(d: NodeUnderTest) -> None:
    """Everything of D is free, scrubbed, and nothing lands there any more."""
    await until(lambda: all_free(d), what="all memory of D is free")
    before = d.arena.buffer[PROBE_NBYTES:].clone()
    await asyncio.sleep(WATCHED_S)
    assert d.arena.buffer[PROBE_NBYTES:].equal(before), "bytes landed in free memory"


async def test_rooms_of_more_pieces_than_the_queue_all_arrive(pair: Pair) -> None:
    n_rooms, n = 250, 200
    big = make_geometry(page_size=128, pages=2 * n_rooms + 1, slots=n_rooms + 1)
    p = await pair.prefill(geometry=big, deadlines=PATIENT)
    d = await pair.decode(p, geometry=big, deadlines=PATIENT)
    p.engine.gate.clear()  # so that all of them go out in one rush
    asked = [request(n, seed) for seed in range(n_rooms)]
    answers = [asyncio.create_task(answer(d.node, one)) for one in asked]
    await until(lambda: len(reqs(p)) == n_rooms, 30.0)
    p.engine.gate.set()
    assert await asyncio.gather(*answers) == [expected(one) for one in asked]
    assert d.engine.wrong_bytes == []
    assert SpyingEngine.submitted > QUEUE
    assert SpyingEngine.most_in_flight <= MAX_PIECES_IN_FLIGHT < QUEUE
    await until(lambda: all_free(p) and all_free(d))


async def test_aborts_in_the_middle_of_a_rush_leave_free_memory_alone(pair: Pair) -> None:
    n_rooms = 10
    big = make_geometry(page_size=128, pages=n_rooms * 33, slots=n_rooms + 1)
    p = await pair.prefill(geometry=big, deadlines=PATIENT)
    d = await pair.decode(p, geometry=big, deadlines=PATIENT)
    generations = [d.node.submit(request(4000, seed)) for seed in range(n_rooms)]
    await until(lambda: SpyingEngine.submitted > 300, 30.0, "pieces are on their way")
    for generation in generations:
        generation.abort()
    await stays_free(d)
    assert d.metric("pd_fences_total") == 0, "P lives, and says when it is quiet"
    await assert_works_again(p, d)


async def test_one_bad_address_fails_its_room_by_component_and_nothing_lands_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The good pieces of the room land, as they do in a batch; the memory is free only when they all have."""
    p = await pair.prefill()
    d = await pair.decode(p)
    assert await answer(d.node, request(300)) == expected(request(300))
    swa = d.arena.layout.component("swa")
    begin = d.arena.ptr + swa.offset
    inside = range(begin, begin + swa.items * swa.item_stride)

    def redirect(dst: int) -> int:
        return NOWHERE if (dst - begin) % swa.item_stride < swa.rows * swa.row_nbytes and dst in inside else dst

    with monkeypatch.context() as broken:
        broken.setattr(SpyingEngine, "redirect", staticmethod(redirect))
        before = SpyingEngine.submitted
        with pytest.raises(RequestFailed, match=r"swa.*refused") as caught:
            await answer(d.node, request(900))
        assert (caught.value.code, caught.value.kind, caught.value.component) == ("transfer_failed", "peer", "swa")
        assert SpyingEngine.submitted - before > 5, "the other pieces went out"
        await stays_free(d)
    assert d.metric("pd_fences_total") == 0, "refused by a living peer: every piece's end is known"
    await assert_works_again(p, d)


async def test_a_decode_node_that_freezes_in_a_transfer_and_wakes_lets_nothing_land_in_free_memory(
    pair: Pair, start_decode: Callable[..., DecodeProcess]
) -> None:
    """P writes to a process that stands still: the pieces wait in socket buffers, and are applied when it wakes."""
    p = await pair.prefill(deadlines=replace(FAST, peer_s=10.0))  # long enough to send pieces to a node that is silent
    d = start_decode(f"127.0.0.1:{p.node.bootstrap_port}")
    assert (await d.hear()).startswith("ready")
    assert await d.ask(300) == "right"
    p.engine.gate.clear()
    d.say("ask 1500 1")
    await until(lambda: any(req.placement is not None for req in reqs(p)), what="P works on the room")
    (session,) = [peer.manifest.session for peer in p.node.manager.senders]
    before = SpyingEngine.submitted
    d.process.send_signal(signal.SIGSTOP)
    p.engine.gate.set()
    await until(lambda: SpyingEngine.submitted > before, what="pieces are on their way to a frozen process")
    await until(lambda: not p.node.manager.senders, what="P gives the silent node up")
    await until(lambda: all_free(p), what="P's memory is free")
    d.process.send_signal(signal.SIGCONT)
    assert (await d.hear()).startswith("failed")
    d.say("quiet")
    assert await d.hear() == "quiet"
    assert await d.ask(300, 2) == "right"
    (again,) = [peer.manifest.session for peer in p.node.manager.senders]
    assert again != session, "a fenced session is not used again"


@pytest.mark.full  # the port is free again only a minute after the first process used it
@pytest.mark.timeout(300)
async def test_a_decode_node_restarted_on_the_same_mooncake_ports_is_served(
    pair: Pair, start_decode: Callable[..., DecodeProcess]
) -> None:
    """Mooncake never looks a session up again: an engine that knew the dead process fails every write for ever."""
    p = await pair.prefill()
    ports = (17300, 17301)  # which no other test uses: one to call, one for data, and no third
    for life in range(2):
        d = start_decode(f"127.0.0.1:{p.node.bootstrap_port}", ports)
        word, session = (await d.hear()).split()
        assert word == "ready"
        assert int(session.rpartition(":")[2]) in ports
        started = time.monotonic()
        assert await d.ask(300, life) == "right"
        assert time.monotonic() - started < RECOVERS_S * MARGIN
        d.end()
