"""A pair whose weights stay in the checkpoint's files answers what a local node with loaded weights does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from server.engine.tokenizer import Tokenizer
from server.kernels.choice import choose_kernels
from server.model.loader import load_model
from server.model.packed import map_checkpoint
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.pair import Side, a_request, answer, running_decode, running_pair
from tests.support.quantized_checkpoints import make_quantized

LENGTHS = [1, 4, 65, 128, 257]
BUDGET = 8 << 20


@pytest.mark.parametrize("k", [0, 3])
async def test_a_pair_equals_the_local_run_with_loaded_weights(tmp_path: Path, tokenizer: Tokenizer, k: int) -> None:
    kernels = choose_kernels("auto", "cpu")
    if kernels.library is None:
        pytest.skip(kernels.reason)
    path = make_quantized(tmp_path / "made", vocab_size=VOCAB_SIZE, n_routed_experts=32, num_experts_per_tok=3).path
    batch = [a_request(random.Random(n).choices(range(10, 500), k=n), logprobs=4) for n in LENGTHS]
    batch.append(a_request(batch[-1].prompt_ids, logprobs=4, temperature=0.8, seed=7))
    side = Side(draft=True, spec_tokens=k, permute_seed=3)
    loaded = kernels.take(load_model(path, draft=True))
    async with running_decode(loaded, tokenizer, side, None) as (_, local):
        expected = [await answer(local, request) for request in batch]
    packed = kernels.take(map_checkpoint(path, BUDGET, draft=True).network)
    async with running_pair(packed, tokenizer, Side(draft=True), side) as pair:
        for request, (outputs, _) in zip(batch, expected, strict=True):
            assert (await pair.answer(request))[0] == outputs, f"{len(request.prompt_ids)} tokens"
        await pair.settled()
    state = packed.weights_state()
    assert state.evictions > 0, "the budget is too large for this test"
    assert state.loaded_nbytes + state.resident_nbytes <= BUDGET
