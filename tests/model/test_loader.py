"""From random numbers to the official format and back: what is loaded is what the stored codes stand for, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server.model import loader
from server.model.layers import Linear
from server.model.loader import load_model, official_key
from tests.support.quantized_checkpoints import BASE, OFFICIAL, make_quantized

ODD: dict[str, Any] = {  # no width is a multiple of 128, most are none of 32; blocks of several scales
    "hidden_size": 298,
    "head_dim": 30,
    "num_attention_heads": 6,
    "qk_rope_head_dim": 6,
    "q_lora_rank": 131,
    "o_groups": 3,
    "o_lora_rank": 53,
    "moe_intermediate_size": 150,
    "index_head_dim": 22,
    "vocab_size": 333,
}


STORED: dict[str, dict[str, Any]] = {
    "fp4": OFFICIAL,
    "fp8": BASE,
    "bf16 experts": {**OFFICIAL, "expert_dtype": "bf16"},
    "plain": {"quantization_config": None, "expert_dtype": None},
}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_what_is_loaded_is_what_the_codes_stand_for(
    tmp_path: Path, stored: dict[str, Any], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a weight is read in several blocks of rows."""
    monkeypatch.setattr(loader, "_BLOCK_NUMBERS", 20_000)
    made = make_quantized(tmp_path, seed=3, shards=shards, **ODD, **stored)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path, dtype=dtype, draft=True)
        loaded = {official_key(name): parameter for name, parameter in model.named_parameters()}
        assert loaded.keys() == made.numbers.keys()
        for key, expected in made.numbers.items():
            assert torch.equal(loaded[key], expected.to(loaded[key].dtype)), key


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_every_linear_map_knows_how_its_weight_is_stored(tmp_path: Path, stored: dict[str, Any]) -> None:
    made = make_quantized(tmp_path, **stored)
    kinds = {torch.float8_e4m3fn: "fp8", torch.int8: "fp4"}
    maps = {
        name: module for name, module in load_model(tmp_path, draft=True).named_modules() if isinstance(module, Linear)
    }
    assert {name: module.quantized for name, module in maps.items()} == {
        name: kinds.get(made.stored[f"{name}.weight"].dtype, "") for name in maps
    }
