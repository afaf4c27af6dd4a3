"""The same network in bfloat16: near fp32, state rows of half the size, and still independent of the chunking."""

from __future__ import annotations

import random

import torch

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.loader import load_model
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED

PLACE = Placement(2, (3, 1))


def logits(dtype: str, chunk: int) -> torch.Tensor:
    model = load_model(BUNDLED, dtype=getattr(torch, dtype))
    geometry = CacheGeometry(256, 6, 4, model.config.sliding_window, 0, state_components(model.config, dtype))
    runner = ModelRunner(model, Arena(ArenaLayout.from_geometry(geometry), poison=True))
    ids = random.Random(0).choices(range(10, 500), k=150)
    parts = [
        runner.forward([Segment(ids[i : i + chunk], i, PLACE)], every_row=True).logits for i in range(0, 150, chunk)
    ]
    return torch.cat(parts)


def test_bfloat16_is_near_fp32_and_chunk_invariant() -> None:
    half, full = logits("bfloat16", 150), logits("float32", 150)
    assert half.isfinite().all()
    scale = full.abs().amax(-1)
    assert ((half - full).abs().amax(-1) / scale).median() < 0.05
    assert torch.equal(half, logits("bfloat16", 32))


def test_window_and_entries_shrink_but_compressor_states_stay_fp32() -> None:
    config = load_model(BUNDLED).config
    for name, half, full in zip(
        (spec.name for spec in state_components(config, "float32")),
        state_components(config, "bfloat16"),
        state_components(config, "float32"),
        strict=True,
    ):
        if "state" in name:
            assert half.row_nbytes == full.row_nbytes
        elif name != "handoff":
            assert 2 * half.row_nbytes == full.row_nbytes
