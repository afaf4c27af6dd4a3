"""Small random DeepSeek-V4 checkpoints, made with transformers, so that the weights and the oracle come from
elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from benchmark.checkpoints import COMMON
from safetensors.torch import load_file, save_file
from tiny.model import official_tensors
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from server.model.config import load_config

BUNDLED = Path(__file__).parents[2] / "server" / "assets" / "tiny-dsv4"
VOCAB_SIZE = load_config(BUNDLED).vocab_size
"""Of the bundled checkpoint: a random one needs as many rows to be used with the bundled tokenizer."""

SMALL: dict[str, Any] = COMMON | {
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "swiglu_limit": 0.5,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 24,
    "sliding_window": 32,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 4096,
    "vocab_size": 320,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "torch_dtype": "float32",
}


def write_checkpoint(
    path: Path, *, seed: int = 0, shards: int = 1, draft: bool = False, **changes: Any
) -> DeepseekV4ForCausalLM:
    """Writes a random checkpoint with official keys and returns the transformers model with the same weights.

    Every tensor is random, also those that usually start at zero or one (biases, norms, sinks, ``ape``), so that
    leaving one out shows.
    """
    raw = {**SMALL, **changes}
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config.from_dict(dict(raw))).float().eval()
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            order = torch.rand(tensor.shape[0], raw["n_routed_experts"]).argsort(dim=1)
            tensor.copy_(order[:, : raw["num_experts_per_tok"]])
        elif "norm" in name:
            tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
        elif tensor.dim() < 2 or "position_bias" in name:
            tensor.copy_(0.5 * torch.randn_like(tensor))
        else:
            tensor.copy_(torch.randn_like(tensor) * 1.5 / tensor.shape[-1] ** 0.5)
    tensors = official_tensors(model, model.state_dict())
    if draft:
        raw["num_nextn_predict_layers"] = 1
        tensors |= draft_tensors(tensors, raw)
    save_official(path, tensors, shards)
    (path / "config.json").write_text(json.dumps(raw))
    return model


def draft_tensors(backbone: dict[str, torch.Tensor], raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A random NextN layer under ``mtp.0.*``: the shapes of a window-only layer with top-k experts, and its own
    parts.
    """
    d, n = raw["hidden_size"], raw["hc_mult"]
    sliding = f"layers.{raw['compress_ratios'].index(0)}."
    tensors = {}
    for name, tensor in backbone.items():
        if name.startswith(sliding) and not name.endswith("tid2eid"):
            shape = tensor.shape
            scale = 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.5
            offset = 1.0 if "norm" in name else 0.0
            tensors["mtp.0." + name.removeprefix(sliding)] = offset + scale * torch.randn(shape)
    own = {
        "ffn.gate.bias": torch.randn(raw["n_routed_experts"]),
        "enorm.weight": 1 + 0.2 * torch.randn(d),
        "hnorm.weight": 1 + 0.2 * torch.randn(d),
        "norm.weight": 1 + 0.2 * torch.randn(d),
        "e_proj.weight": torch.randn(d, d) / d**0.5,
        "h_proj.weight": torch.randn(d, d) / d**0.5,
        "hc_head_fn": torch.randn(n, n * d) / (n * d) ** 0.5,
        "hc_head_base": 0.5 * torch.randn(n),
        "hc_head_scale": 0.5 * torch.randn(1),
    }
    return tensors | {f"mtp.0.{name}": tensor for name, tensor in own.items()}


def save_official(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Writes one safetensors file, or several with an index."""
    path.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a one-file checkpoint."""
    return load_file(path / "model.safetensors")
