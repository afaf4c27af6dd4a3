"""A component that does not arrive fails its request by its name, whatever lay in the memory before; the next request
works.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from server.cache.live import LIVE_RULES, live_positions
from server.engine.request import GenerationRequest
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.faults.spec import FaultSet
from server.model.network import DeepseekV4
from server.model.state import state_components
from tests.support.pair import Pair, Side, a_request, answer, running_decode, running_pair, tokens

N = 391
"""A full page and a part of one, an open group of every compressor: nothing is empty."""
COMPONENTS = tuple(name for name in LIVE_RULES if name != "draft_swa")


def request_of(seed: int, n: int = N) -> GenerationRequest:
    return a_request(random.Random(seed).choices(range(10, 500), k=n), max_tokens=4)


def inject(pair: Pair, fault: str) -> None:
    """Arms the prefill node's hook now; on the command line it would strike the first room."""
    pair.p.faults.faults[:] = FaultSet.parse((fault,)).faults


def test_no_component_is_empty_at_this_length(model: DeepseekV4) -> None:
    names = [spec.name for spec in state_components(model.config, "float32")]
    assert set(names) == set(COMPONENTS)
    assert all(len(rows) > 0 for rows in live_positions(N, model.config.sliding_window, names).values())


@pytest.mark.parametrize("poison", [True, False], ids=["poison", "stale"])
async def test_every_dropped_component_fails_its_request_by_name(
    model: DeepseekV4, tokenizer: Tokenizer, poison: bool
) -> None:
    """One slot and just enough pages: without poison a dropped component leaves an earlier request's rows in place."""
    good = request_of(1)
    async with running_decode(model, tokenizer, Side(), None) as (_, local):
        expected = tokens((await answer(local, good))[0])
    side = Side(slots=1, pages=2, poison=poison)
    async with running_pair(model, tokenizer, side, side) as pair:
        for i, name in enumerate(COMPONENTS):
            await pair.answer(request_of(100 + i))
            inject(pair, f"drop:{name}:1")
            with pytest.raises(RequestFailed) as caught:
                await pair.answer(request_of(200 + i))
            assert (caught.value.component, caught.value.kind) == (name, "peer"), caught.value.failure.reason
            assert caught.value.failure.reason.startswith(f"{name}: ")
            outputs, _ = await pair.answer(good)
            assert tokens(outputs) == expected, f"the request after the one without {name}"
        await pair.settled()
        failed = pair.d.metric("pd_rooms_total", outcome="failed", reason="component_mismatch")
        assert failed == pair.p.metric("pd_rooms_total", outcome="failed", reason="rejected") == len(COMPONENTS)
        assert pair.d.metric("pd_fences_total") == 0, "the peer answered the abort, no fence was needed"


@pytest.mark.parametrize("n", [3, 4, 18, 63, 64, 128, 256])
async def test_at_every_border_exactly_the_components_that_are_not_empty_fail(
    model: DeepseekV4, tokenizer: Tokenizer, n: int
) -> None:
    async with running_pair(model, tokenizer, Side(slots=2), Side(slots=2, poison=False)) as pair:
        live = live_positions(n, model.config.sliding_window, COMPONENTS)
        blamed = {}
        for i, name in enumerate(COMPONENTS):
            inject(pair, f"drop:{name}:1")
            try:
                await pair.answer(request_of(1000 * n + i, n))
            except RequestFailed as failure:
                blamed[name] = failure.component
        assert blamed == {name: name for name, rows in live.items() if len(rows) > 0}


async def test_only_the_struck_room_fails_among_many(model: DeepseekV4, tokenizer: Tokenizer) -> None:
    requests = [request_of(i, 20 + 40 * i) for i in range(8)]
    async with running_decode(model, tokenizer, Side(), None) as (_, local):
        expected = [tokens((await answer(local, request))[0]) for request in requests]
    async with running_pair(model, tokenizer, Side(faults=("drop:swa:1",))) as pair:
        answers = await asyncio.gather(*map(pair.answer, requests), return_exceptions=True)
        failures = [(i, a) for i, a in enumerate(answers) if isinstance(a, BaseException)]
        assert [getattr(failure, "component", failure) for _, failure in failures] == ["swa"]
        for i, found in enumerate(answers):
            if not isinstance(found, BaseException):
                assert tokens(found[0]) == expected[i]
        await pair.settled()


async def test_without_the_checks_the_same_damage_is_served(model: DeepseekV4, tokenizer: Tokenizer) -> None:
    """What the checks are worth: the decode node answers from a zeroed window, other tokens, and no error."""
    request = a_request(random.Random(1).choices(range(10, 500), k=N), max_tokens=16, logprobs=0)
    async with running_pair(model, tokenizer) as pair:
        right, _ = await pair.answer(request)
        inject(pair, "zero:swa")
        pair.d.faults.faults[:] = FaultSet.parse(("unchecked",)).faults
        wrong, _ = await pair.answer(request)
        assert [o.logprobs for o in wrong] != [o.logprobs for o in right]
        assert wrong[0].token_ids == right[0].token_ids, "the first token comes with the hand-off row"
