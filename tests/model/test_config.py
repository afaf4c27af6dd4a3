"""Every field of ``config.json`` is checked by name: its type, its range, and how it fits the others."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from server.model.config import CheckpointError, ModelConfig, Quantization, load_config
from server.model.fields import FIELDS, QUANTIZATION_FIELDS, YARN_FIELDS
from server.model.loader import load_model
from server.model.moe import clamped_swiglu
from tests.support.checkpoints import BUNDLED, SMALL, write_checkpoint

SIZE = [0, -1, 2.0, True, "8", None, 1 << 40]
EVEN = [*SIZE, 7]
NUMBER = [-1, True, "1", None, float("nan"), float("inf")]
SWITCH = [None, "false", 2]

BAD: dict[str, list[Any]] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": [0, 2, True],
    "head_dim": EVEN,
    "qk_rope_head_dim": [*EVEN, 26],  # 26: more than head_dim
    "q_lora_rank": SIZE,
    "o_groups": [*SIZE, 3],  # 3 does not divide the 4 heads
    "o_lora_rank": SIZE,
    "moe_intermediate_size": SIZE,
    "n_routed_experts": [*SIZE, 1],  # 1 is fewer than a token chooses
    "num_experts_per_tok": [*SIZE, 7],
    "n_shared_experts": [0, 2, None],
    "num_hash_layers": [-1, 6, 1.0, True, None],
    "scoring_func": ["sigmoid", None],
    "topk_method": ["greedy", None],
    "norm_topk_prob": [False, 1, None],
    "routed_scaling_factor": [*NUMBER, 0],
    "swiglu_limit": NUMBER,
    "index_n_heads": SIZE,
    "index_head_dim": [*EVEN, 6],  # 6: less than qk_rope_head_dim
    "index_topk": [*SIZE, 1 << 31],  # the kernels count in 32 bits
    "sliding_window": SIZE,
    "hc_mult": [*SIZE, 65],
    "hc_sinkhorn_iters": SIZE,
    "hc_eps": [*NUMBER, 1],
    "rms_norm_eps": [*NUMBER, 1],
    "rope_theta": [*NUMBER, 0, 1],
    "compress_rope_theta": [*NUMBER, 0, 1],
    "max_position_embeddings": [*SIZE, 1],
    "compress_ratios": [[0, 4, 8, 4, 128], [0, 4], [], [0, 4, True, 4, 0], "0", None, {"0": 4}],
    "num_nextn_predict_layers": [-1, 1.0, True, None],
    "tie_word_embeddings": [True, *SWITCH],
    "attention_bias": [True, *SWITCH],
    "mlp_bias": [True, *SWITCH],
    "hidden_act": ["gelu", None],
    "expert_dtype": ["fp4", "fp8", 3],  # without quantization_config
    "dspark_block_size": [-1, 1025, 2.0, True, "8", None],
    "dspark_markov_rank": SIZE,
    "dspark_noise_token_id": [-1, 2.0, True, "8", None],
    "dspark_target_layer_ids": [[1, 0], [0, 0], [-1], [True], "0", None],
}
BAD_YARN: dict[str, list[Any]] = {
    "factor": [*NUMBER, 0, 0.5],
    "beta_fast": [*NUMBER, 0, 1],  # 1: not above beta_slow
    "beta_slow": [*NUMBER, 0, 32],
    "original_max_position_embeddings": [-1, 1.5, True, None, "512"],
    "attention_factor": [0.5, "1"],
}
OFFICIAL = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
BAD_QUANTIZATION: dict[str, list[Any]] = {
    "quant_method": ["awq", None, 8],
    "fmt": ["e5m2", None],
    "scale_fmt": ["float", None],
    "activation_scheme": ["static", None],
    "weight_block_size": [[64, 64], [128], None, 128],
}
DERIVED = {
    "rope_dim": "qk_rope_head_dim",
    "yarn": "rope_scaling",
    "draft_ratio": "compress_ratios",
    "quantization": "expert_dtype",
    "dspark": "dspark_block_size",
}


def config_of(path: Path, **changes: Any) -> ModelConfig:
    raw = {**SMALL, **changes}
    (path / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))
    return load_config(path)


def test_every_field_has_its_bad_values() -> None:
    assert BAD.keys() == FIELDS.keys()
    assert BAD_YARN.keys() == YARN_FIELDS.keys()
    assert BAD_QUANTIZATION.keys() == QUANTIZATION_FIELDS.keys()
    read = {DERIVED.get(field.name, field.name) for field in fields(ModelConfig)}
    assert read <= FIELDS.keys() | {"rope_scaling"}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_field(name: str, tmp_path: Path) -> None:
    for value in BAD[name]:
        if name in SMALL or value is not None or FIELDS[name].default is not None:
            with pytest.raises(CheckpointError, match=rf"config\.json: .*\b{name}\b.*"):
                config_of(tmp_path, **{name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.default is ...])
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        config_of(tmp_path, **{name: ...})


@pytest.mark.parametrize("name", BAD_YARN)
def test_a_bad_value_of_the_scaling_is_refused_by_name(name: str, tmp_path: Path) -> None:
    for value in BAD_YARN[name]:
        if value is not None or YARN_FIELDS[name].default is not None:
            with pytest.raises(CheckpointError, match=r"rope_scaling\.(beta_slow|" + name + ")"):
                config_of(tmp_path, rope_scaling={**SMALL["rope_scaling"], name: value})


@pytest.mark.parametrize("name", BAD_QUANTIZATION)
def test_another_quantization_is_refused_by_name(name: str, tmp_path: Path) -> None:
    for value in BAD_QUANTIZATION[name]:
        with pytest.raises(CheckpointError, match=rf"quantization_config\.{name}"):
            config_of(tmp_path, quantization_config={**OFFICIAL, name: value})


@pytest.mark.parametrize(
    ("expert_dtype", "expected"),
    [
        ("fp4", Quantization("fp8", "fp4")),
        ("fp8", Quantization("fp8", "fp8")),
        ("bf16", Quantization("fp8", "")),
        (None, Quantization("fp8", "fp4", experts_stated=False)),
    ],
)
def test_the_config_says_how_weights_are_stored(
    expert_dtype: str | None, expected: Quantization, tmp_path: Path
) -> None:
    config = config_of(tmp_path, quantization_config=OFFICIAL, expert_dtype=expert_dtype)
    assert config.quantization == expected


@pytest.mark.parametrize("scaling", [[], "yarn", {"type": "linear", "factor": 2}, {"type": "yarn", "factor": 2}])
def test_another_kind_of_scaling_is_refused_by_name(scaling: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rope_scaling"):
        config_of(tmp_path, rope_scaling=scaling)


def test_an_original_context_of_zero_means_no_scaling(tmp_path: Path) -> None:
    scaling = {**SMALL["rope_scaling"], "original_max_position_embeddings": 0}
    assert config_of(tmp_path, rope_scaling=scaling).yarn is None
    assert config_of(tmp_path).yarn is not None


@pytest.mark.parametrize("dtype", ["bf16", "fp32", None])
def test_unquantized_experts_are_no_quantized_checkpoint(dtype: str | None, tmp_path: Path) -> None:
    assert config_of(tmp_path, expert_dtype=dtype).n_routed_experts == SMALL["n_routed_experts"]


def test_the_bundled_and_the_official_configuration_are_accepted(tmp_path: Path) -> None:
    assert load_config(BUNDLED).draft_ratio == 0
    flash = {
        "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 6, "num_hash_layers": 3,
        "swiglu_limit": 10.0, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128,
        "max_position_embeddings": 1048576, "vocab_size": 129280, "topk_method": "noaux_tc",
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    }  # fmt: skip
    assert config_of(tmp_path, **flash).layers_of(4)[0] == 2


def test_a_limit_of_zero_does_not_clamp() -> None:
    gate, up = torch.tensor([-30.0, 0.5, 40.0]), torch.tensor([50.0, -60.0, 70.0])
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(clamped_swiglu(gate.clone(), up.clone(), 0.0), expected)
    clamped = clamped_swiglu(gate.clone(), up.clone(), 10.0)
    assert torch.allclose(clamped[2], torch.nn.functional.silu(torch.tensor(10.0)) * 10)


def test_a_directory_of_save_pretrained_is_called_by_its_name(tmp_path: Path) -> None:
    official, saved = tmp_path / "official", tmp_path / "saved"
    DeepseekV4ForCausalLM(DeepseekV4Config.from_dict(dict(SMALL))).save_pretrained(saved)
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load_model(saved)
    write_checkpoint(official)  # the same tensors beside an official config.json
    (saved / "config.json").write_text((official / "config.json").read_text())
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load_model(saved)
