"""Prefix reuse on the decode node: what it has is offered, proved and read in place, whatever the prefill node says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import msgspec
import pytest

from server.cache.digest import PageRanges, StateParts
from server.cache.layout import Placement, Run
from server.cache.prefix import CachedPage, PrefixCache
from server.engine.events import Event, PrefillFinished
from server.engine.request import FinishReason, GenerationRequest, RoutedRoom, RouteInfo
from server.failure import RequestFailed
from server.faults.hooks import Put
from server.transfer.frames import encode
from server.transfer.protocol import Abort, AnyMessage, Done, Rejected, Reserve
from server.transfer.rooms import RoomKey
from tests.decode.held import claims
from tests.nodes.support import FAST, NodeUnderTest, Pair, all_free, answer, deaf_to, expected, phase_is, request
from tests.support.waiting import until
from tests.transfer.support import PAGE_SIZE, make_geometry

PAGES = 4
LONG = PAGES * PAGE_SIZE + 76


def cache_of(node: NodeUnderTest) -> PrefixCache:
    assert node.parts.prefix_cache is not None
    return node.parts.prefix_cache


class ScriptedPrefill:
    """A prefill node that says of every room what it is told to: that the pages ``held`` are, and with ``lie`` worse.

    ``offered`` are what it was offered, room by room, in pages.
    """

    def __init__(self, p: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: PageRanges = ()
        self.lie: Callable[[Done], Done] = lambda done: done
        self.offered: list[int] = []
        self._layout = p.arena.layout
        self._parts: dict[Hashable, StateParts] = {}
        self._post, self._on_event = p.parts.hooks.post, p.engine.on_event
        self._on_message = p.node.manager.on_message
        monkeypatch.setattr(p.parts.hooks, "post", self.post)
        monkeypatch.setattr(p.engine, "on_event", self.on_event)
        monkeypatch.setattr(p.node.manager, "on_message", self.on_message)

    def on_message(self, peer: object, message: AnyMessage) -> None:
        if isinstance(message, Reserve):
            self.offered.append(len(message.offered) // 8)
            message = msgspec.structs.replace(message, offered=b"")  # the real node below sends everything
        self._on_message(peer, message)

    def on_event(self, event: Event) -> None:
        if isinstance(event, PrefillFinished):
            assert isinstance(event.key, RoomKey)
            self._parts[event.key.room, event.key.epoch] = event.parts
        self._on_event(event)

    def post(self, message: AnyMessage, frame: bytes, put: Put) -> None:
        if isinstance(message, Done):
            held = tuple((first, min(stop, self.offered[-1])) for first, stop in self.held if first < self.offered[-1])
            wanted = {sent.component for sent in message.sent}
            sent = claims(self._layout, message.n, self._parts[message.room, message.epoch], held)
            sent = tuple(claim for claim in sent if claim.component in wanted)
            message = self.lie(msgspec.structs.replace(message, held=held, sent=sent))
            frame = encode(message)
        self._post(message, frame, put)


async def start(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, pages: int = 15
) -> tuple[NodeUnderTest, NodeUnderTest, ScriptedPrefill]:
    p = await pair.prefill()
    script = ScriptedPrefill(p, monkeypatch)
    d = await pair.decode(p, geometry=make_geometry(extra_rows=2, slots=4, pages=pages), reuse=True)
    return p, d, script


def follow_up(asked: GenerationRequest, n_more: int = 90, **sampling: int) -> GenerationRequest:
    """The next turn of a chat: prompt, answer, and something new."""
    more = request(n_more, seed=5, **sampling)
    return replace(more, prompt_ids=(*asked.prompt_ids, *expected(asked), *more.prompt_ids))


def cached(d: NodeUnderTest) -> int:
    return d.counts()["pages"]["cached"]


def is_over(d: NodeUnderTest) -> bool:
    """Nothing is anybody's but the cache's."""
    counts = d.counts()
    if d.node.manager.reqs or any(d.arena.owners.readers_of(page) for page in d.parts.allocator.cached_pages()):
        return False
    return all(n == 0 for kind in counts.values() for state, n in kind.items() if state not in ("free", "cached"))


async def routed(d: NodeUnderTest, asked: GenerationRequest) -> tuple[list[int], RouteInfo]:
    generation = d.node.submit(asked)
    route = await generation.route()
    return [token async for output in generation for token in output.token_ids], route


def flip(d: NodeUnderTest, page: int) -> None:
    """A bit in a page of the decode node's memory."""
    run = Run(d.arena.layout.row_offset("c4_kv", Placement(1, (page,)), 0), 1)
    d.arena.write(run, bytes([d.arena.memory(run)[0] ^ 1]))


SPANS: dict[str, PageRanges] = {
    "none": (),
    "all": ((0, PAGES),),
    "some": ((0, 2),),
    "in the middle": ((1, 3),),
    "two spans": ((0, 1), (2, PAGES)),
}


@pytest.mark.parametrize("held", SPANS.values(), ids=SPANS)
async def test_what_is_held_is_read_in_place(pair: Pair, monkeypatch: pytest.MonkeyPatch, held: PageRanges) -> None:
    _, d, script = await start(pair, monkeypatch)
    first, second = request(LONG), follow_up(request(LONG), max_tokens=5)
    assert await answer(d.node, first) == expected(first)
    await until(lambda: is_over(d))
    assert cached(d) == len(cache_of(d)) == PAGES
    kept = [page.page for page in cache_of(d).match(cache_of(d).keys_of(second.prompt_ids))]
    script.held = held
    d.engine.gate.clear()
    generation = d.node.submit(second)
    route = await generation.route()
    n_held = sum(stop - start for start, stop in held)
    (req,) = d.node.manager.reqs.values()
    places = [page for start, stop in held for page in range(start, stop)]
    assert [req.placement.pages[i] for i in places] == [kept[i] for i in places]
    assert d.counts()["pages"]["shared"] == n_held, "the other offers are let go"
    assert d.counts()["pages"]["committed"] == 5 - n_held
    d.engine.gate.set()
    assert [token async for output in generation for token in output.token_ids] == expected(second)
    assert d.engine.wrong_bytes == []
    assert script.offered == [0, PAGES]
    page_nbytes = d.arena.layout.page_nbytes
    total = sum(d.arena.layout.live_nbytes(len(second.prompt_ids)).values())
    assert sum(route.transfer_bytes.values()) == total - n_held * page_nbytes
    record = d.node.manager.records.find(route.room)
    assert record is not None
    assert record.transfer is not None
    assert sum(record.transfer.held_nbytes.values()) == n_held * page_nbytes
    peer = f"127.0.0.1:{pair.started[0].node.bootstrap_port}"
    assert d.metric("pd_prefix_held_bytes_total", peer=peer) == n_held * page_nbytes
    await until(lambda: is_over(d))
    assert cached(d) == PAGES, "none twice"


async def test_pages_that_an_answer_completes_are_offered_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, d, script = await start(pair, monkeypatch)
    first = request(500, max_tokens=40)
    assert await answer(d.node, first) == expected(first)
    await until(lambda: is_over(d))
    assert cached(d) == 2, "the second page ends inside the answer"
    script.held = ((0, 2),)
    second = follow_up(first)
    assert await answer(d.node, second) == expected(second)
    assert script.offered == [0, 2]
    assert d.engine.wrong_bytes == []


async def test_an_aborted_answer_leaves_its_pages_and_a_failed_one_none(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, d, script = await start(pair, monkeypatch)
    d.engine.gate.clear()
    generation = d.node.submit(request(600, max_tokens=2000))
    await generation.route()
    generation.abort()
    outputs = [output async for output in generation]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    await until(lambda: is_over(d))
    assert cached(d) == 2
    failing = d.node.submit(request(600, seed=1, max_tokens=2000))
    await failing.route()
    d.engine.fail_answers = True
    d.engine.gate.set()
    with pytest.raises(RequestFailed):
        _ = [output async for output in failing]
    await until(lambda: is_over(d))
    assert cached(d) == 2
    d.engine.fail_answers = False
    assert await answer(d.node, request(600, seed=1)) == expected(request(600, seed=1))
    assert script.offered == [0, 0, 0]


LIES: dict[str, Callable[[Done], Done]] = {
    "more than offered": lambda d: msgspec.structs.replace(d, held=((0, 9),)),
    "out of order": lambda d: msgspec.structs.replace(d, held=((2, 4), (0, 1))),
    "overlapping": lambda d: msgspec.structs.replace(d, held=((0, 3), (2, 4))),
    "a slot is held": lambda d: msgspec.structs.replace(
        d, sent=tuple(msgspec.structs.replace(s, held_nbytes=s.held_nbytes + 1) for s in d.sent)
    ),
    "nothing was held": lambda d: msgspec.structs.replace(d, held=()),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_wrong_claim_fails_the_room_and_nothing_leaks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Done], Done]
) -> None:
    p, d, script = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    script.held, script.lie = ((0, PAGES),), lie
    with pytest.raises(RequestFailed) as caught:
        await answer(d.node, follow_up(request(LONG)))
    assert caught.value.code == "component_mismatch"
    await until(lambda: is_over(d) and all_free(p))
    assert cached(d) == PAGES
    script.lie = lambda done: done
    assert await answer(d.node, follow_up(request(LONG))) == expected(follow_up(request(LONG)))
    assert d.engine.wrong_bytes == []


@pytest.mark.parametrize("damaged", [0, 2])
async def test_damage_in_a_held_page_is_forgotten_and_the_same_node_is_asked_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    p, d, script = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))

    def offering(_key: Hashable, pages: Sequence[CachedPage], _cache: PrefixCache) -> None:
        flip(d, pages[damaged].page)

    with monkeypatch.context() as patched:
        patched.setattr(d.parts.hooks, "offering", offering)
        script.held = ((0, PAGES),)
        tokens, route = await routed(d, follow_up(request(LONG)))
    assert (tokens, route.n_retries) == (expected(follow_up(request(LONG))), 1)
    assert script.offered == [0, PAGES, 0]
    assert d.engine.wrong_bytes == []
    assert d.metric("pd_retries_total", reason="prefix_damaged") == 1
    assert cache_of(d).counts.damaged == 1
    await until(lambda: is_over(d) and all_free(p))
    assert cached(d) == PAGES, "the sound ones were kept, the others came anew"
    assert await answer(d.node, follow_up(request(LONG))) == expected(follow_up(request(LONG)))
    assert script.offered[-1] == PAGES
    assert d.engine.wrong_bytes == []


async def test_a_node_that_says_held_of_other_bytes_costs_one_retry_and_its_pages_take_their_place(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a page that was computed elsewhere with other bits, on a prefill node that compares nothing."""
    _, d, script = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    script.held = ((1, PAGES),)
    script.lie = lambda done: msgspec.structs.replace(
        done, sent=tuple(msgspec.structs.replace(s, held_digest=s.held_digest ^ bool(s.held_nbytes)) for s in done.sent)
    )
    tokens, route = await routed(d, follow_up(request(LONG)))
    assert (tokens, route.n_retries) == (expected(follow_up(request(LONG))), 1)
    assert script.offered == [0, PAGES, 0]
    await until(lambda: is_over(d))
    assert cached(d) == PAGES


async def test_a_routers_room_with_damage_fails_by_name_and_the_next_one_is_right(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, script = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    script.held = ((0, PAGES),)
    for page in cache_of(d).match(cache_of(d).keys_of(request(LONG).prompt_ids))[:1]:
        flip(d, page.page)
    address = ("127.0.0.1", p.node.bootstrap_port)
    for room in (7, 8):
        asked = replace(follow_up(request(LONG)), routed=RoutedRoom(room, *address))
        half = p.node.submit(replace(asked, routed=RoutedRoom(room)))
        if room == 7:
            with pytest.raises(RequestFailed) as caught:
                await answer(d.node, asked)
            assert caught.value.code == "prefix_damaged"
        else:
            assert await answer(d.node, asked) == expected(asked)
        half.abort()
    assert script.offered == [0, PAGES, 0]


async def test_an_abort_while_pages_are_pinned_gives_them_back_to_the_cache(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, _ = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    p.engine.gate.clear()
    generation = d.node.submit(follow_up(request(LONG)))
    await phase_is(d, "prefill")
    assert d.counts()["pages"]["shared"] == PAGES
    generation.abort()
    p.engine.gate.set()
    await until(lambda: is_over(d) and all_free(p))
    assert cached(d) == PAGES


async def test_a_peer_lost_while_pages_are_pinned_leaves_them_as_they_were(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, script = await start(pair, monkeypatch)
    other = await pair.prefill(port=0)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    p.engine.gate.clear()
    generation = d.node.submit(follow_up(request(LONG)))
    await phase_is(d, "prefill")
    assert d.counts()["pages"]["shared"] == PAGES
    await pair.stop(p)
    with pytest.raises(RequestFailed):
        _ = [output async for output in generation]
    await until(lambda: is_over(d))
    assert cached(d) == PAGES
    assert script.offered == [0, PAGES]
    assert not other.engine.prefilled


async def test_nothing_cached_keeps_a_request_from_its_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven pages: four are kept, the next turn needs five of its own, so two may be pinned beside them."""
    _, d, script = await start(pair, monkeypatch, pages=8)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    assert cached(d) == PAGES
    script.held = ((0, PAGES),)
    assert await answer(d.node, follow_up(request(LONG))) == expected(follow_up(request(LONG)))
    assert script.offered == [0, 2]
    other = request(7 * PAGE_SIZE - 10, seed=3)
    assert await answer(d.node, other) == expected(other)
    assert cache_of(d).counts.evicted_pages > 0
    assert d.engine.wrong_bytes == []


async def test_a_page_given_up_between_offer_and_commit_is_still_read_and_free_afterwards(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, d, script = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))

    def offering(_key: Hashable, _pages: Sequence[CachedPage], cache: PrefixCache) -> None:
        cache.flush()

    with monkeypatch.context() as patched:
        patched.setattr(d.parts.hooks, "offering", offering)
        script.held = ((0, PAGES),)
        tokens, route = await routed(d, follow_up(request(LONG)))
    assert (tokens, route.n_retries) == (expected(follow_up(request(LONG))), 0)
    assert d.engine.wrong_bytes == []
    await until(lambda: is_over(d))
    assert cached(d) == 0, "what follows a page that was given up is not kept"


async def test_two_requests_read_the_same_pages_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, d, script = await start(pair, monkeypatch, pages=30)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    script.held = ((0, PAGES),)
    asked = [follow_up(request(LONG), n_more=80 + i) for i in range(3)]
    assert await asyncio.gather(*(answer(d.node, one) for one in asked)) == [expected(one) for one in asked]
    assert d.engine.wrong_bytes == []
    await until(lambda: is_over(d))
    assert cached(d) == PAGES


async def test_other_tenants_and_requests_without_an_answer_are_offered_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, d, script = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    tenant = replace(request(LONG), cache_salt="another")
    assert await answer(d.node, tenant) == expected(tenant)
    await answer(d.node, request(LONG, max_tokens=0))
    assert script.offered == [0, 0, 0]
    await until(lambda: is_over(d))
    assert cached(d) == 2 * PAGES


async def test_an_attempt_after_damage_asks_another_node_if_its_own_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only slot is in quarantine, as nobody answers the abort; then the node that was to be asked again ends."""
    scripts = [(p, ScriptedPrefill(p, monkeypatch)) for p in (await pair.prefill(), await pair.prefill())]
    d = await pair.decode(
        *(p for p, _ in scripts),
        geometry=make_geometry(slots=2, extra_rows=2),
        deadlines=replace(FAST, quiesce_s=60.0),
        reuse=True,
    )
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    flip(d, cache_of(d).match(cache_of(d).keys_of(request(LONG).prompt_ids))[0].page)
    for p, script in scripts:
        script.held = ((0, PAGES),)
        deaf_to(p, Abort | Rejected, monkeypatch)
    generation = d.node.submit(follow_up(request(LONG)))
    await until(lambda: len(d.node.manager.queue) == 1)
    assert d.node.server_info()["quarantine"][0]["code"] == "prefix_damaged"
    first = next(p for p, script in scripts if PAGES in script.offered)
    await pair.stop(first)
    route = await generation.route()
    assert route.prefill != f"127.0.0.1:{first.node.bootstrap_port}"
    assert [token async for output in generation for token in output.token_ids] == expected(follow_up(request(LONG)))
    assert d.engine.wrong_bytes == []


async def test_turns_of_a_chat_send_only_what_is_new(pair: Pair) -> None:
    """Both nodes are real: P computes on from its cache, compares what is offered, and sends the rest."""
    p = await pair.prefill(reuse=True)
    d = await pair.decode(p, geometry=make_geometry(extra_rows=2, slots=4, pages=30), reuse=True)
    layout, asked, n_before = d.arena.layout, request(300, max_tokens=60), 0
    for _turn in range(8):
        tokens, route = await routed(d, asked)
        assert tokens == expected(asked)
        n = len(asked.prompt_ids)
        n_held = n_before // PAGE_SIZE
        total = sum(layout.live_nbytes(n).values())
        assert sum(route.transfer_bytes.values()) == total - n_held * layout.page_nbytes
        await until(lambda: is_over(d) and is_over(p))
        record = d.node.manager.records.find(route.room)
        assert record is not None
        assert record.tokens.reused == route.cached_tokens
        n_before = n + len(tokens) - 1
        asked = follow_up(asked, n_more=200, max_tokens=60)
    assert route.cached_tokens >= PAGE_SIZE
    assert d.engine.wrong_bytes == p.engine.wrong_bytes == []
    assert d.metric("pd_check_failures_total", check="digest", component="c4_kv") == 0


async def test_after_damage_here_the_prefill_node_is_not_to_blame(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one is asked again, and if that fails for a reason of its own, there is still another."""
    nodes = [await pair.prefill(), await pair.prefill()]
    scripts = [ScriptedPrefill(p, monkeypatch) for p in nodes]
    d = await pair.decode(*nodes, geometry=make_geometry(extra_rows=2, slots=4, pages=15), reuse=True)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))
    flip(d, cache_of(d).match(cache_of(d).keys_of(request(LONG).prompt_ids))[0].page)
    for script in scripts:
        script.held = ((0, PAGES),)
    tokens, route = await routed(d, follow_up(request(LONG)))
    assert tokens == expected(follow_up(request(LONG)))
    asked = next(p for p, script in zip(nodes, scripts, strict=True) if PAGES in script.offered)
    assert (route.prefill, route.n_retries) == (f"127.0.0.1:{asked.node.bootstrap_port}", 1)
    await until(lambda: is_over(d))
    flip(d, cache_of(d).match(cache_of(d).keys_of(request(LONG).prompt_ids))[0].page)
    for script in scripts:
        script.held, script.lie = ((0, PAGES),), lambda done: done if done.held else msgspec.structs.replace(done, n=1)
    with pytest.raises(RequestFailed):
        await answer(d.node, follow_up(request(LONG)))
    assert [script.offered[-1] for script in scripts] == [0, 0]


async def test_a_request_that_cannot_be_granted_memory_fails_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, d, _ = await start(pair, monkeypatch)
    await answer(d.node, request(LONG))
    await until(lambda: is_over(d))

    def offering(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(d.parts.hooks, "offering", offering)
        with pytest.raises(RequestFailed, match="broken on purpose") as caught:
            await answer(d.node, follow_up(request(LONG)))
    assert caught.value.code == "internal_error"
    assert is_over(d)
    assert cached(d) == PAGES
    assert await answer(d.node, follow_up(request(LONG))) == expected(follow_up(request(LONG)))
