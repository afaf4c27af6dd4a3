"""The architecture of one checkpoint, read through transformers and checked for what this implementation computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import DeepseekV4Config

SLIDING, CSA, HCA = 0, 4, 128
"""Compress ratios, which name the three kinds of layer: window only, compressed sparse, heavily compressed."""


class CheckpointError(ValueError):
    """A model directory that cannot be served; the message names the file, key or field and what to do."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN of the compressed layers: ``factor``, the two betas and the original context length."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass needs to know; field names as in the official ``config.json`` where they say it well.

    ``compress_ratios`` has one entry per backbone layer (0, 4 or 128); ``draft_ratio`` is the entry of the NextN layer,
    which transformers drops, or None if the checkpoint lists none.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    max_position_embeddings: int
    compress_ratios: tuple[int, ...]
    draft_ratio: int | None

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Backbone layer ids of one kind."""
        return tuple(i for i, r in enumerate(self.compress_ratios) if r == ratio)


def load_config(model_dir: Path) -> ModelConfig:
    """Reads ``config.json`` of a model directory. Raises :class:`CheckpointError` naming the field that cannot be
    served.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{model_dir} has no config.json: give --model a checkpoint directory")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("model_type") != "deepseek_v4":
        found = raw.get("model_type") if isinstance(raw, dict) else type(raw).__name__
        raise CheckpointError(f"{path}: model_type is {found!r}, expected 'deepseek_v4'")
    return _from_raw(raw, str(path))


def _from_raw(raw: dict[str, Any], where: str) -> ModelConfig:
    if raw.get("quantization_config") is not None or raw.get("expert_dtype") is not None:
        method = (raw.get("quantization_config") or {}).get("quant_method", raw.get("expert_dtype"))
        raise CheckpointError(
            f"{where}: the checkpoint is quantized ({method}), which is not supported yet; "
            "convert it to bfloat16 or float32"
        )
    try:
        hf = DeepseekV4Config.from_dict(dict(raw))
    except Exception as error:  # transformers raises many kinds; each means the same to the reader
        raise CheckpointError(f"{where}: transformers refuses this configuration: {error}") from error
    _require(where, "scoring_func", hf.scoring_func, "sqrtsoftplus")
    _require(where, "norm_topk_prob", hf.norm_topk_prob, True)
    _require(where, "num_key_value_heads", hf.num_key_value_heads, 1)
    _require(where, "n_shared_experts", hf.n_shared_experts, 1)
    _require(where, "attention_bias", hf.attention_bias, False)
    _require(where, "tie_word_embeddings", hf.tie_word_embeddings, False)
    _require(where, "hidden_act", hf.hidden_act, "silu")
    ratios = raw.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < hf.num_hidden_layers:
        raise CheckpointError(f"{where}: compress_ratios must list one ratio for each of {hf.num_hidden_layers} layers")
    if bad := [r for r in ratios if r not in (SLIDING, CSA, HCA)]:
        raise CheckpointError(f"{where}: compress_ratios holds {bad[0]}, only {SLIDING}, {CSA} and {HCA} exist")
    n = hf.num_hidden_layers
    return ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_hidden_layers=n,
        num_attention_heads=hf.num_attention_heads,
        head_dim=hf.head_dim,
        rope_dim=hf.qk_rope_head_dim,
        q_lora_rank=hf.q_lora_rank,
        o_groups=hf.o_groups,
        o_lora_rank=hf.o_lora_rank,
        moe_intermediate_size=hf.moe_intermediate_size,
        n_routed_experts=hf.n_routed_experts,
        num_experts_per_tok=hf.num_experts_per_tok,
        num_hash_layers=sum(kind == "hash_moe" for kind in hf.mlp_layer_types or ()),
        routed_scaling_factor=hf.routed_scaling_factor,
        swiglu_limit=hf.swiglu_limit,
        index_n_heads=hf.index_n_heads,
        index_head_dim=hf.index_head_dim,
        index_topk=hf.index_topk,
        sliding_window=hf.sliding_window,
        hc_mult=hf.hc_mult,
        hc_sinkhorn_iters=hf.hc_sinkhorn_iters,
        hc_eps=hf.hc_eps,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=float(hf.rope_theta),
        compress_rope_theta=float(hf.compress_rope_theta),
        yarn=_yarn(raw, where),
        max_position_embeddings=hf.max_position_embeddings,
        compress_ratios=tuple(ratios[:n]),
        draft_ratio=ratios[n] if len(ratios) > n else None,
    )


def _yarn(raw: dict[str, Any], where: str) -> YarnScaling | None:
    scaling = raw.get("rope_scaling")
    if scaling is None:
        scaling = (raw.get("rope_parameters") or {}).get("compress")
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(f"{where}: rope_scaling type {kind!r} is not supported, only 'yarn'")
    return YarnScaling(
        factor=float(scaling["factor"]),
        beta_fast=float(scaling.get("beta_fast", 32)),
        beta_slow=float(scaling.get("beta_slow", 1)),
        original_max_position=int(scaling["original_max_position_embeddings"]),
    )


def _require(where: str, field: str, found: object, expected: object) -> None:
    if found != expected:
        raise CheckpointError(f"{where}: {field} is {found!r}, this server computes only {expected!r}")
