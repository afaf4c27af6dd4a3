"""Aborts in every phase, by the client's disconnect and by the node's own abort: no slot or page is lost on either
node, and nobody else's answer changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from server.decode import room_manager
from server.decode.room import Proof
from server.decode.verify import Evidence, verify
from server.engine.events import ChunkComputed
from server.engine.generation import NodeGeneration
from server.engine.request import FinishReason, GenerationRequest
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.model.interface import LoadedModel
from server.transfer.checks import Check
from server.transfer.engines.base import Ticket
from server.transfer.engines.mooncake import MooncakeEngine
from tests.support import waiting
from tests.support.http import http_server
from tests.support.pair import Pair, Side, a_request, answer, running_decode, running_pair, tokens

FREED_S = 20.0
"""After an abort everything is free again within this time, far below any deadline of a phase."""
WAYS = ("abort", "disconnect")
PHASES = ("waiting", "reserve", "queued", "prefill", "transfer", "verify", "decode")


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * n + seed).choices(range(10, 500), k=n)


class SlowTransport(MooncakeEngine):
    """Takes its time for every piece, so that a transfer lasts."""

    def submit(self, session: str, src: int, dst: int, nbytes: int) -> Ticket:
        time.sleep(0.05)
        return super().submit(session, src, dst, nbytes)


def slow_verify(evidence: Evidence, skipped: frozenset[Check]) -> Proof:
    time.sleep(0.3)
    return verify(evidence, skipped)


@dataclass
class Client:
    """Somebody who asks and goes away: over HTTP, or as the node's own caller."""

    pair: Pair
    http: httpx.AsyncClient
    way: str
    generation: NodeGeneration | None = None
    post: asyncio.Task[Any] | None = None
    reader: asyncio.Task[Any] | None = None
    outputs: list[Any] = field(default_factory=list)

    def ask(self, request: GenerationRequest) -> None:
        if self.way == "abort":
            self.generation = self.pair.decode.submit(request)
            self.reader = asyncio.create_task(self._read(self.generation))
        else:
            body = {"prompt": list(request.prompt_ids), "max_tokens": request.sampling.max_tokens, "ignore_eos": True}
            self.post = asyncio.create_task(self._stream(body))

    async def go(self) -> None:
        if self.generation is not None and self.reader is not None:
            self.generation.abort()
            self.generation.abort()  # may be said twice
            await asyncio.wait_for(self.reader, FREED_S)
        elif self.post is not None:
            self.post.cancel()
            await asyncio.wait([self.post])

    async def _read(self, generation: NodeGeneration) -> None:
        with contextlib.suppress(RequestFailed):
            await generation.route()
        async for output in generation:
            self.outputs.append(output)

    async def _stream(self, body: dict[str, Any]) -> None:
        async with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self.outputs.append(line)


def room_phases(pair: Pair) -> list[str]:
    """The phases of the rooms on the decode node, in order of their opening."""
    return [req.room.phase.value for req in pair.decode.manager.reqs.values() if req.room is not None]


until = partial(waiting.until, poll_s=0.0)
"""Some phases are short."""


@contextlib.asynccontextmanager
async def client_of(pair: Pair, way: str) -> AsyncIterator[Client]:
    async with (
        http_server(pair.decode, pair.d.registry) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        yield Client(pair, http, way)


Others = list[Awaitable[Any]]


async def _waiting(pair: Pair, client: Client) -> Others:
    """All slots of D are taken: the request waits in D's own queue."""
    others = [asyncio.create_task(pair.answer(a_request(prompt(20, i), max_tokens=60))) for i in range(4)]
    await until(lambda: pair.d.free[0] == 0, what="D is full")
    client.ask(a_request(prompt(30)))
    await until(lambda: pair.decode.server_info()["waiting"] == 1, what="the request waits")
    return [*others]


async def _reserve(pair: Pair, client: Client, monkeypatch: pytest.MonkeyPatch) -> Others:
    """P hears nothing of the request (its control messages are lost for a while)."""
    with monkeypatch.context() as lossy:
        lossy.setattr(pair.prefill.manager, "on_message", lambda peer, message: None)
        client.ask(a_request(prompt(30)))
        await until(lambda: room_phases(pair) == ["reserve"], what="the room is opened")
        await asyncio.sleep(0.1)
        assert room_phases(pair) == ["reserve"]
        await client.go()
        await asyncio.sleep(0.1)
        assert not pair.d.all_free, "an Abort without an answer frees nothing"
    return []


async def _queued(pair: Pair, client: Client) -> Others:
    """P has one slot, and a long prompt is in it."""
    other = asyncio.create_task(pair.answer(a_request(prompt(700), max_tokens=2)))
    await until(lambda: room_phases(pair) == ["prefill"], what="the other prompt is being computed")
    client.ask(a_request(prompt(30)))
    await until(lambda: room_phases(pair) == ["prefill", "queued"], what="the request is queued on P")
    return [other]


async def _prefill(pair: Pair, client: Client) -> Others:
    client.ask(a_request(prompt(1500)))
    await until(
        lambda: sum(isinstance(e, ChunkComputed) for e in pair.p.events) >= 20, what="a page and more is computed"
    )
    assert room_phases(pair) == ["prefill"]
    return []


async def _phase(pair: Pair, client: Client, phase: str) -> Others:
    client.ask(a_request(prompt(300)))
    await until(lambda: room_phases(pair) == [phase], what=f"the room is in phase {phase}")
    return []


async def _decode(pair: Pair, client: Client) -> Others:
    client.ask(a_request(prompt(30), max_tokens=4000))
    await until(lambda: len(client.outputs) > 2, what="some tokens have come")
    return []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_in_every_phase_frees_both_nodes(
    model: LoadedModel, tokenizer: Tokenizer, phase: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SlowTransport if phase == "transfer" else MooncakeEngine
    if phase == "verify":
        monkeypatch.setattr(room_manager, "verify", slow_verify)
        monkeypatch.setattr(room_manager, "CHECKED_AT_ONCE_NBYTES", 0)
    p_side = Side(chunk_tokens=16, slots=1 if phase == "queued" else 4)
    async with (
        running_pair(model, tokenizer, p_side, Side(slots=4, permute_seed=2), transport=transport) as pair,
        client_of(pair, way) as client,
    ):
        match phase:
            case "waiting":
                others = await _waiting(pair, client)
            case "reserve":
                others = await _reserve(pair, client, monkeypatch)
            case "queued":
                others = await _queued(pair, client)
            case "prefill":
                others = await _prefill(pair, client)
            case "decode":
                others = await _decode(pair, client)
            case _:
                others = await _phase(pair, client, phase)
        await client.go()
        if others:
            await until(lambda: pair.decode.server_info()["waiting"] == 0, 1.0, "it waits no more")
            await until(lambda: len(pair.decode.manager.reqs) == len(others), 1.0, "only the others are left")
        else:
            await pair.settled(FREED_S)
        for outputs, _ in await asyncio.gather(*others):
            assert outputs[-1].finish_reason is FinishReason.LENGTH, "the others are not disturbed"
        await pair.settled(FREED_S)
        if client.generation is not None:
            assert client.outputs[-1].finish_reason is FinishReason.ABORT
        if phase not in ("waiting", "decode"):
            assert pair.d.metric("pd_rooms_total", outcome="aborted", reason="aborted") == 1
        assert pair.d.metric("pd_fences_total") == 0, "the peer lives and answers: no fence is needed"
        assert (await pair.answer(a_request(prompt(40), max_tokens=3)))[0][-1].finish_reason is FinishReason.LENGTH


async def check_random_aborts(
    model: LoadedModel, tokenizer: Tokenizer, n_aborts: int, concurrency: int, slots: int
) -> None:
    """Aborts at random moments, while a witness asks again and again and must get the same answers as from a quiet
    local node.
    """
    rng = random.Random(n_aborts)
    witnesses = [a_request(prompt(n), max_tokens=5) for n in (5, 64, 130, 300)]
    async with running_decode(model, tokenizer, Side(permute_seed=3), None) as (_, local):
        expected = [tokens((await answer(local, request))[0]) for request in witnesses]
    sides = Side(chunk_tokens=32, slots=slots, pages=16), Side(slots=slots, pages=16, permute_seed=2)
    async with (
        running_pair(model, tokenizer, *sides) as pair,
        http_server(pair.decode, pair.d.registry) as url,
        httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http,
    ):
        gate, left = asyncio.Semaphore(concurrency), n_aborts

        async def one(seed: int) -> None:
            nonlocal left
            n, delay_s, way = rng.randrange(1, 700), rng.uniform(0, 0.4), rng.choice(WAYS)
            async with gate:
                client = Client(pair, http, way)
                client.ask(a_request(prompt(n, seed), max_tokens=rng.choice((2, 300))))
                await asyncio.sleep(delay_s)
                await client.go()
                left -= 1

        async def witness() -> int:
            n_rounds = 0
            while left:
                i = n_rounds % len(witnesses)
                outputs, route = await pair.answer(witnesses[i])
                assert tokens(outputs) == expected[i], f"the witness of {len(witnesses[i].prompt_ids)} tokens"
                assert route.prefill != "local"
                n_rounds += 1
            return n_rounds

        n_rounds, _ = await asyncio.gather(witness(), asyncio.gather(*map(one, range(n_aborts))))
        assert n_rounds > 1
        await pair.settled(FREED_S)
        assert pair.decode.server_info()["waiting"] == 0
        assert not pair.decode.manager.reqs
        assert pair.d.metric("pd_fences_total") == 0
        for request, wanted in zip(witnesses, expected, strict=True):
            assert tokens((await pair.answer(request))[0]) == wanted
        await pair.settled(FREED_S)


async def test_forty_aborts_at_random_moments_lose_nothing(model: LoadedModel, tokenizer: Tokenizer) -> None:
    await check_random_aborts(model, tokenizer, 40, concurrency=5, slots=4)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slots", [2, 6])
async def test_three_hundred_aborts_at_random_moments_lose_nothing(
    model: LoadedModel, tokenizer: Tokenizer, slots: int
) -> None:
    await check_random_aborts(model, tokenizer, 300, concurrency=8, slots=slots)
