"""The checkpoints that are measured: the bundled one, and random ones of other shapes, written when they are needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from checkpoint_making.config import with_format
from checkpoint_making.making import random_weights, write_checkpoint
from checkpoint_making.tokenizer import tokenizer_files

from server.model.config import load_config
from server.node.options import BUNDLED_MODEL

LONG_POSITIONS = 65536
FORMAT = "bf16"
"""Of random checkpoints: a baseline may not know the quantized ones."""

COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 65536,
    "vocab_size": load_config(BUNDLED_MODEL).vocab_size,  # the bundled tokenizer's
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
"""What all random checkpoints begin with, also those of the tests."""

MEDIUM: dict[str, Any] = COMMON | {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 128,
    "moe_intermediate_size": 432,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_hash_layers": 2,
    "index_n_heads": 32,
    "index_head_dim": 64,
    "index_topk": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 5, 0],
}
"""About 228 million parameters: too large for any cache, small enough for two cores."""

FLASH: dict[str, Any] = COMMON | {
    "hidden_size": 128,
    "num_hidden_layers": 43,
    "num_attention_heads": 2,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 3,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
"""The state of DeepSeek-V4-Flash, byte for byte but for its hidden streams, on a network as thin as it can be."""


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "o_groups": 2,
    "q_lora_rank": 32,
    "moe_intermediate_size": 32,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
}
"""What a quick run changes in the random ones."""


class Checkpoints:
    """Checkpoint folders by name. Random ones are made once, under ``folder``; small ones if ``quick``."""

    def __init__(self, folder: Path, *, quick: bool = False) -> None:
        self._folder, self._changes = folder, SMALL if quick else {}

    def path(self, name: str) -> Path:
        """``bundled``, ``medium``, ``flash``, or ``bundled, long``: the bundled weights with more positions."""
        if name == "bundled":
            return BUNDLED_MODEL
        path = self._folder / name.replace(", ", "-")
        if not path.exists():
            if name == "bundled, long":
                _with_more_positions(BUNDLED_MODEL, path)
            else:
                write_random({"medium": MEDIUM, "flash": FLASH}[name] | self._changes, path)
        return path


def _with_more_positions(source: Path, path: Path) -> None:
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG_POSITIONS}))


def write_random(config: dict[str, Any], path: Path, seed: int = 0) -> None:
    """Writes a checkpoint of ``config`` with random weights (bf16) and the bundled tokenizer."""
    raw = with_format(config, FORMAT)
    write_checkpoint(path, raw, FORMAT, random_weights(raw, FORMAT, seed), copied=tokenizer_files(BUNDLED_MODEL))
