"""Disaggregated equals monolithic, bit for bit: tokens, log probabilities, and every live byte of every component."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from server.cache.layout import Placement
from server.cache.live import LIVE_RULES
from server.cache.specs import HANDOFF, Scope
from server.engine.events import Command, Resume
from server.engine.request import GenerationRequest
from server.engine.tokenizer import Tokenizer
from server.model.batch import Segment
from server.model.interface import LoadedModel
from server.model.numerics import OFFICIAL
from server.model.state import state_components
from server.node.options import BUNDLED_MODEL
from tests.support.models import load
from tests.support.pair import Pair, Side, a_request, answer, running_decode, running_pair, tokens
from tests.support.runners import make_runner

LENGTHS = [1, 3, 4, 5, 18, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512, 513, 1025]
QUICK = [1, 4, 18, 65, 128, 257, 513]
CHUNKS = [1, 7, 64, 256]


def prompt(n: int) -> list[int]:
    return random.Random(n).choices(range(10, 500), k=n)


def requests_of(lengths: list[int], **sampling: object) -> list[GenerationRequest]:
    return [a_request(prompt(n), logprobs=4, **sampling) for n in lengths]


async def check_parity(model: LoadedModel, tokenizer: Tokenizer, lengths: list[int], chunk: int) -> None:
    """One after the other through a pair and through a local node with other ids: the outputs are equal, logprobs
    too.
    """
    side = Side(chunk_tokens=chunk)
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    requests = requests_of(lengths) + requests_of(lengths[:3], **sampled)
    requests += requests_of(lengths, prompt_logprobs=3, max_tokens=0) + requests_of(lengths[-2:], prompt_logprobs=20)
    async with running_decode(model, tokenizer, replace(side, permute_seed=3), None) as (_, local):
        expected = [await answer(local, request) for request in requests]
    async with running_pair(model, tokenizer, side, replace(side, permute_seed=2)) as pair:
        for request, (outputs, route) in zip(requests, expected, strict=True):
            assert route.prefill == "local"
            ours, served = await pair.answer(request)
            assert ours == outputs, f"{len(request.prompt_ids)} prompt tokens, chunks of {chunk}"
            assert served.prefill.endswith(f":{pair.prefill.bootstrap_port}")
        await pair.settled()


@pytest.mark.parametrize("chunk", [7, 64])
async def test_tokens_and_logprobs_equal_the_local_run(model: LoadedModel, tokenizer: Tokenizer, chunk: int) -> None:
    await check_parity(model, tokenizer, QUICK, chunk)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chunk", CHUNKS)
async def test_whole_grid_equals_the_local_run(model: LoadedModel, tokenizer: Tokenizer, chunk: int) -> None:
    await check_parity(model, tokenizer, LENGTHS, chunk)


@pytest.fixture(scope="module")
def official_model() -> LoadedModel:
    return load(BUNDLED_MODEL, numerics=OFFICIAL)


async def test_official_numerics_equals_the_local_run(official_model: LoadedModel, tokenizer: Tokenizer) -> None:
    await check_parity(official_model, tokenizer, QUICK, 64)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", [7, 256])
async def test_official_numerics_over_the_whole_list(
    official_model: LoadedModel, tokenizer: Tokenizer, chunk: int
) -> None:
    await check_parity(official_model, tokenizer, LENGTHS, chunk)


async def test_sixteen_at_once_equal_one_by_one(model: LoadedModel, tokenizer: Tokenizer) -> None:
    requests = requests_of([random.Random(i).randrange(1, 400) for i in range(32)], max_tokens=16)
    async with running_decode(model, tokenizer, Side(permute_seed=5), None) as (_, local):
        expected = [tokens((await answer(local, request))[0]) for request in requests]
    async with running_pair(model, tokenizer) as pair:
        gate = asyncio.Semaphore(16)

        async def one(request: GenerationRequest) -> list[int]:
            async with gate:
                return tokens((await pair.answer(request))[0])

        assert list(await asyncio.gather(*map(one, requests))) == expected
        await pair.settled()


async def committed_image(pair: Pair, request: GenerationRequest) -> tuple[bytes, bytes]:
    """D's whole arena before the request and just before decoding began."""
    before, images = bytes(pair.d.arena.buffer.numpy()), list[bytes]()

    def look(command: Command) -> None:
        if isinstance(command, Resume):
            images.append(bytes(pair.d.arena.buffer.numpy()))

    pair.d.before_command = look
    await pair.answer(request)
    return before, images[0]


def state_after_prompt(model: LoadedModel, request: GenerationRequest, chunk: int) -> dict[str, bytes]:
    """Every component's live bytes as a node computes them (P scrubs its own as soon as D has committed)."""
    n = len(request.prompt_ids)
    runner = make_runner(model)
    place = Placement(1, (4, 2, 6, 5, 1))
    for start in range(0, n, chunk):
        runner.forward([Segment(request.prompt_ids[start : start + chunk], start, place)])
    runs = runner.arena.layout.live_runs(n, place)
    return {name: runner.arena.read(part) for name, part in runs.items() if name != HANDOFF}


async def test_every_live_byte_arrives_and_no_other_changes(model: LoadedModel, tokenizer: Tokenizer) -> None:
    async with running_pair(model, tokenizer) as pair:
        layout, moved = pair.d.arena.layout, dict.fromkeys(pair.d.arena.layout.names, 0)
        for n in QUICK:
            request = a_request(prompt(n))
            before, after = await committed_image(pair, request)
            runs = layout.live_runs(n, pair.placements(request)[1])
            live = bytearray(len(before))
            for run in (run for part in runs.values() for run in part):
                live[run.offset : run.offset + run.nbytes] = b"\1" * run.nbytes
            stray = [i for i in range(len(before)) if before[i] != after[i] and not live[i]]
            assert stray == [], f"{n} tokens: bytes outside the live ranges changed, the first at {stray[:1]}"
            expected = state_after_prompt(model, request, pair.p.side.chunk_tokens)
            for name, image in expected.items():
                arrived = b"".join(after[run.offset : run.offset + run.nbytes] for run in runs[name])
                assert arrived == image, f"{name} after {n} tokens"
            for name, nbytes in layout.live_nbytes(n).items():
                moved[name] += nbytes
                assert pair.d.metric("pd_transfer_bytes_total", component=name) == moved[name], name
            await pair.settled()


async def test_pieces_of_a_request_are_bounded(model: LoadedModel, tokenizer: Tokenizer) -> None:
    """Full-page runs + 3 (the part-filled page) + 3 for each ring component + 1 (the hand-off row)."""
    async with running_pair(model, tokenizer) as pair:
        rings = [c.name for c in pair.d.arena.layout.components if c.scope is Scope.SLOT and c.name != HANDOFF]
        seen = 0.0
        for n in (1, 18, 64, 129, 513, 1025):
            request = a_request(prompt(n))
            await pair.answer(request)
            at_p, at_d = pair.placements(request)
            steps = [(at_p.pages[i] - at_p.pages[i - 1], at_d.pages[i] - at_d.pages[i - 1]) for i in range(1, n // 256)]
            full_page_runs = min(1, n // 256) + sum(step != (1, 1) for step in steps)
            pieces = pair.d.metric("pd_transfer_pieces_total") - seen
            seen += pieces
            assert 1 <= pieces <= full_page_runs + 3 + 3 * len(rings) + 1, f"{n} tokens"


@pytest.mark.parametrize(("p_k", "d_k"), [(0, 3), (0, 5), (3, 0), (5, 1)])
async def test_peers_with_different_rings(model: LoadedModel, tokenizer: Tokenizer, p_k: int, d_k: int) -> None:
    requests = requests_of([1, 5, 18, 64, 70, 129, 200, 257])
    async with running_decode(model, tokenizer, Side(), None) as (_, local):
        expected = [await answer(local, request) for request in requests]
    async with running_pair(model, tokenizer, Side(spec_tokens=p_k), Side(spec_tokens=d_k, permute_seed=9)) as pair:
        for request, (outputs, _) in zip(requests, expected, strict=True):
            assert (await pair.answer(request))[0] == outputs, (
                f"{len(request.prompt_ids)} tokens, rings {p_k} and {d_k}"
            )


def test_the_bundled_model_has_every_kind_of_component(model: LoadedModel) -> None:
    """So that the tests above miss none."""
    names = {spec.name for spec in state_components(model.config, "float32")}
    assert names == set(LIVE_RULES) - {"draft_swa"}
