"""The draft across the wire: its window arrives, accept counts equal the monolithic run's step by step, or it is
refused.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from evaluation.questions import bundled_questions

from server.cache.live import LIVE_RULES
from server.cache.specs import DRAFT
from server.engine.request import GenerationRequest, TokenOutput
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.model.interface import LoadedModel
from server.model.numerics import OFFICIAL
from tests.support.checkpoints import BUNDLED
from tests.support.models import load
from tests.support.pair import Pair, Side, a_request, answer, peers_of, running_decode, running_pair, tokens

LENGTHS = [1, 3, 4, 5, 18, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512, 513, 1025]
QUICK = [1, 18, 64, 129, 257]
P_SIDE = Side(draft=True)

PLAIN: dict[tuple[tuple[int, ...], int], list[int]] = {}
"""What plain decoding answers, by prompt and length: the same for every k."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(BUNDLED, draft=True)


def requests(lengths: list[int], **sampling: object) -> list[GenerationRequest]:
    """Prompts of the bundled task's words, so that some drafts stand and some do not."""
    return [a_request(random.Random(n).choices(range(10, 500), k=n), **{"max_tokens": 32, **sampling}) for n in lengths]


def steps(outputs: list[TokenOutput]) -> list[tuple[int, int]]:
    return [(output.n_proposed, output.n_accepted) for output in outputs]


def decoder(k: int, **changes: Any) -> Side:
    return replace(Side(spec_tokens=k, draft=k > 0, permute_seed=4), **changes)


async def check_steps(model: LoadedModel, tokenizer: Tokenizer, lengths: list[int], p: Side, k: int) -> None:
    batch = requests(lengths)
    async with running_decode(model, tokenizer, decoder(k), None) as (_, local):
        expected = [await answer(local, request) for request in batch]
    async with running_pair(model, tokenizer, p, decoder(k)) as pair:
        for request, (outputs, route) in zip(batch, expected, strict=True):
            ours, served = await pair.answer(request)
            assert steps(ours) == steps(outputs), f"{len(request.prompt_ids)} tokens, k = {k}"
            assert ours == outputs
            assert (served.draft_state, route.draft_state) == ("transfer", "local")
        await pair.settled()


@pytest.mark.parametrize("k", [1, 3])
async def test_accept_counts_equal_the_local_run_step_by_step(model: LoadedModel, tokenizer: Tokenizer, k: int) -> None:
    await check_steps(model, tokenizer, QUICK, P_SIDE, k)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("p_k", [0, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
async def test_accept_counts_over_the_whole_list(model: LoadedModel, tokenizer: Tokenizer, k: int, p_k: int) -> None:
    """Unequal rings too: P sized for no draft, or for another k."""
    await check_steps(model, tokenizer, LENGTHS, replace(P_SIDE, spec_tokens=p_k), k)


@pytest.fixture(scope="module")
def official_model() -> LoadedModel:
    return load(BUNDLED, draft=True, numerics=OFFICIAL)


async def test_official_numerics_drafts_like_the_local_run(official_model: LoadedModel, tokenizer: Tokenizer) -> None:
    await check_steps(official_model, tokenizer, QUICK, P_SIDE, 3)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("k", [1, 5])
async def test_official_numerics_drafts_over_the_whole_list(
    official_model: LoadedModel, tokenizer: Tokenizer, k: int
) -> None:
    await check_steps(official_model, tokenizer, LENGTHS, P_SIDE, k)


async def test_draft_window_is_live_rows_exactly(model: LoadedModel, tokenizer: Tokenizer) -> None:
    """Its bytes are counted and proved as a component of its own; a decoder without drafts does not ask for it."""
    request = requests([150])[0]
    async with running_pair(model, tokenizer, P_SIDE, decoder(3)) as pair:
        await pair.answer(request)
        rows = LIVE_RULES[DRAFT](150, model.config.sliding_window)
        nbytes = len(rows) * pair.d.arena.layout.component(DRAFT).row_nbytes
        assert pair.d.metric("pd_transfer_bytes_total", component=DRAFT) == nbytes > 0
        assert pair.d.metric("pd_draft_tokens_total", outcome="proposed") > 0
        assert pair.d.metric("pd_accept_length_count") > 0
        assert pair.d.metric("pd_accept_length_early_count") > 0
    async with running_pair(model, tokenizer, P_SIDE, decoder(0)) as pair:
        await pair.answer(request)
        assert pair.d.metric("pd_transfer_bytes_total", component=DRAFT) == 0


async def first_error(pair: Pair) -> RequestFailed:
    with pytest.raises(RequestFailed) as failure:
        await pair.answer(requests([20])[0])
    return failure.value


async def test_draft_state_missing_is_refused_by_name(model: LoadedModel, tokenizer: Tokenizer) -> None:
    async with running_pair(model, tokenizer, Side(), decoder(3)) as pair:
        error = await first_error(pair)
        assert error.kind == "unavailable"
        assert "components.draft_swa" in error.failure.reason
        assert peers_of(pair.decode)[0]["state"] == "refused"


async def test_recompute_starts_cold_and_says_so(model: LoadedModel, tokenizer: Tokenizer) -> None:
    """Without the draft's window: the same answers, said in the route, the info and the metrics."""
    batch = requests(QUICK)
    async with running_decode(model, tokenizer, decoder(0), None) as (_, local):
        expected = [tokens((await answer(local, request))[0]) for request in batch]
    side = decoder(3, cold_draft=True)
    async with running_pair(model, tokenizer, Side(), side) as pair:
        for request, plain in zip(batch, expected, strict=True):
            outputs, route = await pair.answer(request)
            assert tokens(outputs) == plain
            assert route.draft_state == "recompute"
        assert pair.decode.server_info()["draft_state"] == "recompute"
        assert pair.d.metric("pd_draft_state", mode="recompute") == 1


async def test_a_dropped_draft_window_fails_by_name(model: LoadedModel, tokenizer: Tokenizer) -> None:
    async with running_pair(model, tokenizer, replace(P_SIDE, faults=("drop:draft_swa:1",)), decoder(3)) as pair:
        error = await first_error(pair)
        assert (error.code, error.component) == ("component_mismatch", DRAFT)
        await pair.answer(requests([20])[0])
        await pair.settled()


@pytest.mark.parametrize(("k", "batch_size"), [(2, 6)])
async def test_greedy_output_does_not_depend_on_k(
    model: LoadedModel, tokenizer: Tokenizer, k: int, batch_size: int
) -> None:
    await check_output(model, tokenizer, [1, 18, 65, 128, 200, 257][:batch_size], k, 48)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
async def test_two_hundred_tokens_from_every_length(model: LoadedModel, tokenizer: Tokenizer, k: int) -> None:
    await check_output(model, tokenizer, LENGTHS, k, 200)


async def check_output(model: LoadedModel, tokenizer: Tokenizer, lengths: list[int], k: int, n_tokens: int) -> None:
    """k = 0 one by one, then k drafts: one by one and all at once, local and through the pair."""
    batch = requests(lengths, max_tokens=n_tokens)
    missing = [request for request in batch if (request.prompt_ids, n_tokens) not in PLAIN]
    async with running_decode(model, tokenizer, decoder(0), None) as (_, local):
        for request in missing:
            PLAIN[request.prompt_ids, n_tokens] = tokens((await answer(local, request))[0])
    expected = [PLAIN[request.prompt_ids, n_tokens] for request in batch]
    async with running_decode(model, tokenizer, decoder(k), None) as (_, local):
        alone = [tokens((await answer(local, request))[0]) for request in batch]
        together = await asyncio.gather(*(answer(local, request) for request in batch))
    assert alone == expected
    assert [tokens(outputs) for outputs, _ in together] == expected
    async with running_pair(model, tokenizer, P_SIDE, decoder(k)) as pair:
        together = await asyncio.gather(*(pair.answer(request) for request in batch))
        assert [tokens(outputs) for outputs, _ in together] == expected
        await pair.settled()


def questions(n: int) -> list[GenerationRequest]:
    """Bundled questions as scripts/gsm8k.py asks them: 4 shots, greedy, until a blank line."""
    tokenizer, asked = Tokenizer.load(BUNDLED), bundled_questions()[:n]
    return [a_request(tokenizer.encode(text), max_tokens=64, ignore_eos=False, stop=("\n\n",)) for _, text in asked]


async def check_questions(model: LoadedModel, tokenizer: Tokenizer, n: int) -> float:
    """The pair's steps equal the local ones for every question; returns the mean accept length."""
    batch = questions(n)
    counts: list[tuple[int, int]] = []
    async with running_decode(model, tokenizer, decoder(3), None) as (_, local):
        expected = [steps((await answer(local, request))[0]) for request in batch]
    async with running_pair(model, tokenizer, P_SIDE, decoder(3)) as pair:
        for i, (request, local_steps) in enumerate(zip(batch, expected, strict=True)):
            ours = steps((await pair.answer(request))[0])
            assert ours == local_steps, f"question {i}"
            counts += [step for step in ours if step[0]]
        await pair.settled()
    return 1 + sum(n_accepted for _, n_accepted in counts) / len(counts)


async def test_bundled_questions_are_drafted_like_locally(model: LoadedModel, tokenizer: Tokenizer) -> None:
    assert await check_questions(model, tokenizer, 10) >= 2.5


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_all_bundled_questions_are_drafted_like_locally(model: LoadedModel, tokenizer: Tokenizer) -> None:
    assert await check_questions(model, tokenizer, 200) >= 2.5
