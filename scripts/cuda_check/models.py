"""The models that are checked: the bundled one, and random ones that are made in memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmark.checkpoints import COMMON

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry
from server.engine.runner import ModelRunner
from server.model.config import ModelConfig, load_config
from server.model.network import DeepseekV4
from server.model.state import state_components

FLASH: dict[str, Any] = COMMON | {
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "max_position_embeddings": 1048576,
    "vocab_size": 129280,
    "compress_ratios": [0, 4, 128, 4, 0],
}
"""DeepSeek-V4-Flash's layers at their real size, and four of them instead of 43: window alone, CSA, HCA, CSA."""
FLASH_LAYERS = 43

SMALL: dict[str, Any] = FLASH | {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 32,
    "sliding_window": 32,
    "max_position_embeddings": 16384,
    "vocab_size": 529,
}
"""Every kind of layer, with many experts of which a token takes few: they compute in one grouped product."""


def config_of(raw: dict[str, Any], n_layers: int = 4) -> ModelConfig:
    """The first ``n_layers`` layers of ``raw``, as a checkpoint's ``config.json`` is read."""
    ratios = raw["compress_ratios"]
    changed = {"num_hidden_layers": n_layers, "compress_ratios": [*ratios[:n_layers], ratios[-1]]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw | changed), encoding="utf-8")
        return load_config(Path(folder))


def on_meta(config: ModelConfig, dtype: torch.dtype, *, draft: bool = False) -> DeepseekV4:
    """The network without memory."""
    with torch.device("meta"):
        return DeepseekV4(config, dtype, 0, draft=draft).requires_grad_(False).eval()


def nbytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@torch.no_grad()
def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, draft: bool = False, seed: int = 0
) -> DeepseekV4:
    """Random weights of a size that keeps activations near one; norms near one; a hash layer's experts, all different.

    They are drawn on ``device``: two devices give two models.
    """
    model = on_meta(config, dtype, draft=draft).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in model.named_parameters():
        if name.endswith("tid2eid"):
            scores = torch.rand(tensor.shape[0], config.n_routed_experts, generator=generator, device=device)
            tensor.copy_(scores.argsort(dim=1)[:, : tensor.shape[1]])
        elif "norm" in name:
            tensor.normal_(1, 0.1, generator=generator)
        elif tensor.dim() > 1 and not name.endswith("ape"):
            tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
        else:
            tensor.normal_(0, 0.1, generator=generator)
    return model


def runner_of(
    model: DeepseekV4, device: torch.device, *, pages: int = 64, slots: int = 40, kv_dtype: str = "model"
) -> ModelRunner:
    """``model`` over pools of its own on ``device``."""
    dtype = str(model.dtype).removeprefix("torch.")
    components = state_components(model.config, dtype, draft=model.drafts, kv_dtype=kv_dtype)
    geometry = CacheGeometry(256, pages + 1, slots + 1, model.config.sliding_window, 0, components)
    return ModelRunner(model, Arena(ArenaLayout.from_geometry(geometry), device))
