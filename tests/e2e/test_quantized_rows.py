"""Quantized rows through a pair: answers of the local run, the bytes of the layout, and the same faults by name."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from server.cache.live import LIVE_RULES
from server.engine.request import GenerationRequest
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.model.interface import LoadedModel
from server.model.numerics import OFFICIAL
from tests.e2e.test_faults import DAMAGES, bench
from tests.support.checkpoints import BUNDLED
from tests.support.models import BOTH, load
from tests.support.pair import Side, a_request, answer, running_decode, running_pair

LENGTHS = [1, 3, 4, 5, 18, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512, 513, 1025]
QUICK = [4, 65, 129, 257]
FP8 = Side(kv_dtype="fp8", draft=True)


@pytest.fixture(scope="module", params=BOTH)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return load(BUNDLED, request.param, draft=True)


def requests(lengths: list[int]) -> list[GenerationRequest]:
    """Greedy ones, and two that are sampled."""
    prompts = [random.Random(n).choices(range(10, 500), k=n) for n in lengths]
    sampled = [a_request(ids, logprobs=4, temperature=0.8, seed=7) for ids in prompts[-2:]]
    return [a_request(ids, logprobs=4) for ids in prompts] + sampled


async def check_parity(model: LoadedModel, tokenizer: Tokenizer, lengths: list[int], k: int, side: Side) -> None:
    """Through a pair and through a local node with other ids: equal outputs, and exactly the live bytes moved."""
    batch, decoder = requests(lengths), replace(side, spec_tokens=k, draft=k > 0, permute_seed=4)
    async with running_decode(model, tokenizer, replace(decoder, permute_seed=3), None) as (_, local):
        expected = [await answer(local, request) for request in batch]
    async with running_pair(model, tokenizer, side, decoder) as pair:
        layout = pair.d.arena.layout
        planned = dict.fromkeys(layout.names, 0)
        for request, (outputs, _) in zip(batch, expected, strict=True):
            ours, served = await pair.answer(request)
            assert ours == outputs, f"{len(request.prompt_ids)} tokens, k = {k}"
            assert served.prefill.endswith(f":{pair.prefill.bootstrap_port}")
            for name, nbytes in layout.live_nbytes(len(request.prompt_ids)).items():
                planned[name] += nbytes
        await pair.settled()
        moved = {name: pair.d.metric("pd_transfer_bytes_total", component=name) for name in layout.names}
        assert moved == planned


@pytest.mark.parametrize("k", [0, 3])
async def test_a_pair_equals_the_local_run(model: LoadedModel, tokenizer: Tokenizer, k: int) -> None:
    await check_parity(model, tokenizer, QUICK, k, FP8)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("index_dtype", ["auto", "fp8", "model"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("chunk", [7, 256])
async def test_whole_grid_equals_the_local_run(
    model: LoadedModel, tokenizer: Tokenizer, k: int, chunk: int, index_dtype: str
) -> None:
    await check_parity(model, tokenizer, LENGTHS, k, replace(FP8, chunk_tokens=chunk, index_dtype=index_dtype))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kv_dtype", ["fp8", "model"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("kernels", BOTH)
async def test_official_numerics_equal_the_local_run_too(
    tokenizer: Tokenizer, kernels: str, k: int, kv_dtype: str
) -> None:
    model = load(BUNDLED, kernels, draft=True, numerics=OFFICIAL)
    await check_parity(model, tokenizer, LENGTHS, k, replace(FP8, kv_dtype=kv_dtype))


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_quantized_rows_fail_their_request_by_name(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, damage: str
) -> None:
    async with bench(model, tokenizer, tmp_path, kv_dtype="fp8") as made:
        names = ("swa", "c4_index")
        found = {name: await made.verdicts(f"{damage}:{name}") for name in names}
        assert found == {name: [f"digest:{name}"] * (2 if damage == "swap" else 1) for name in names}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", DAMAGES)
async def test_every_damaged_component_fails_its_request_by_name(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, damage: str
) -> None:
    async with bench(model, tokenizer, tmp_path, kv_dtype="fp8", index_dtype="fp8") as made:
        found = {name: await made.verdicts(f"{damage}:{name}") for name in LIVE_RULES}
        assert found == {name: [f"digest:{name}"] * (2 if damage == "swap" else 1) for name in LIVE_RULES}


async def test_quantized_rows_that_never_came_are_not_served(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Without the checks the decode node reads what free memory holds: NaN in every quantized format."""
    async with bench(model, tokenizer, tmp_path, kv_dtype="fp8") as made:
        for name in ("swa", "c4_kv", "c128_kv"):
            made.arm(f"drop:{name}", "unchecked")
            with pytest.raises(RequestFailed) as failed:
                await made.pair.answer(made.request(max_tokens=4))
            assert failed.value.failure.code == "non_finite_logits", name
        made.arm()
