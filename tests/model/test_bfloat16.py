"""The same network in bfloat16: near fp32, state rows of half the size, and still independent of the chunking."""

from __future__ import annotations

import pytest
import torch

from server.cache.layout import Placement
from server.model.config import load_config
from server.model.numerics import OFFICIAL, PLAIN, Numerics
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED
from tests.support.models import BOTH, load
from tests.support.runners import make_runner, prefill, prompt


def logits(dtype: torch.dtype, chunk: int, kernels: str, numerics: Numerics = PLAIN) -> torch.Tensor:
    model = load(BUNDLED, kernels, dtype=dtype, numerics=numerics)
    return prefill(make_runner(model), prompt(150, model), Placement(2, (3, 1)), chunk)


@pytest.mark.parametrize("kernels", BOTH)
def test_bfloat16_is_near_fp32_and_chunk_invariant(kernels: str) -> None:
    half, full = logits(torch.bfloat16, 150, kernels), logits(torch.float32, 150, kernels)
    assert half.isfinite().all()
    scale = full.abs().amax(-1)
    assert ((half - full).abs().amax(-1) / scale).median() < 0.05
    assert torch.equal(half, logits(torch.bfloat16, 32, kernels))


def test_official_numerics_is_chunk_invariant_too() -> None:
    half = logits(torch.bfloat16, 150, "python", OFFICIAL)
    assert half.isfinite().all()
    assert torch.equal(half, logits(torch.bfloat16, 32, "python", OFFICIAL))


def test_window_and_entries_shrink_but_compressor_states_stay_fp32() -> None:
    config = load_config(BUNDLED)
    for half, full in zip(state_components(config, "bfloat16"), state_components(config, "float32"), strict=True):
        if "state" in full.name:
            assert half.row_nbytes == full.row_nbytes
        elif full.name != "handoff":
            assert 2 * half.row_nbytes == full.row_nbytes
