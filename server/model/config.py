"""The architecture of one checkpoint, checked for what this implementation computes."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from server.model.fields import (
    CSA,
    FIELDS,
    HCA,
    QUANTIZATION_FIELDS,
    QUANTIZED,
    SLIDING,
    UNQUANTIZED,
    YARN_FIELDS,
    CheckpointError,
    check_together,
    read_fields,
    saved_by_transformers,
)

__all__ = [
    "CSA",
    "HCA",
    "SLIDING",
    "CheckpointError",
    "DSpark",
    "ModelConfig",
    "Quantization",
    "YarnScaling",
    "config_from",
    "load_config",
]


@dataclass(frozen=True)
class YarnScaling:
    """YaRN of the compressed layers: ``factor``, the two betas and the original context length."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int


@dataclass(frozen=True)
class Quantization:
    """How weights are stored: ``linears`` (attention, shared experts, draft), routed ``experts``; empty: unquantized.

    A config that does not say how experts are stored is one of the releases with fp4 (``experts_stated`` false): only
    the tensors themselves tell.
    """

    linears: Literal["", "fp8"] = ""
    experts: Literal["", "fp8", "fp4"] = ""
    experts_stated: bool = True


@dataclass(frozen=True)
class DSpark:
    """The draft of the later releases: ``stages`` blocks that read the streams leaving ``target_layers`` and draft
    ``block_size`` tokens at once; ``markov_rank`` is the width of the head that chains them.
    """

    stages: int
    target_layers: tuple[int, ...]
    block_size: int
    markov_rank: int
    noise_token_id: int


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass needs to know; field names as in the official ``config.json`` where they say it well.

    ``compress_ratios`` has one entry per backbone layer (0, 4 or 128); ``draft_ratio`` is the entry of the NextN layer
    (or of the first stage of ``dspark``), or None if the checkpoint lists none.
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
    quantization: Quantization = Quantization()
    dspark: DSpark | None = None

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
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("model_type") != "deepseek_v4":
        found = raw.get("model_type") if isinstance(raw, dict) else type(raw).__name__
        raise CheckpointError(f"{path}: model_type is {found!r}, expected 'deepseek_v4'")
    return config_from(raw, str(path))


def config_from(raw: dict[str, Any], where: str) -> ModelConfig:
    """The architecture that the content of a ``config.json`` describes; ``where`` names it in errors. Raises
    :class:`CheckpointError`.
    """
    if "compress_ratios" not in raw and "layer_types" in raw:
        raise saved_by_transformers(where, "it has layer_types instead of compress_ratios")
    values = read_fields(raw, FIELDS, where)
    check_together(values, where)
    n, ratios = values["num_hidden_layers"], values["compress_ratios"]
    same_name = {field.name for field in fields(ModelConfig)} & values.keys() - {"compress_ratios"}
    return ModelConfig(
        **{name: values[name] for name in same_name},
        rope_dim=values["qk_rope_head_dim"],
        yarn=_yarn(raw, where),
        compress_ratios=tuple(ratios[:n]),
        draft_ratio=ratios[n] if len(ratios) > n else None,
        quantization=_quantization(raw, values["expert_dtype"], where),
        dspark=_dspark(values),
    )


def _dspark(values: dict[str, Any]) -> DSpark | None:
    if not values["dspark_block_size"]:
        return None
    return DSpark(
        stages=len(values["compress_ratios"]) - values["num_hidden_layers"],
        target_layers=tuple(values["dspark_target_layer_ids"]),
        block_size=values["dspark_block_size"],
        markov_rank=values["dspark_markov_rank"],
        noise_token_id=values["dspark_noise_token_id"],
    )


def _quantization(raw: dict[str, Any], expert_dtype: str | None, where: str) -> Quantization:
    """What ``quantization_config`` and ``expert_dtype`` say together."""
    settings = raw.get("quantization_config")
    if settings is None:
        if expert_dtype in QUANTIZED:
            raise CheckpointError(f"{where}: expert_dtype is {expert_dtype!r}, but there is no quantization_config")
        return Quantization()
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where}: quantization_config is {settings!r}; allowed is an object or null")
    read_fields(settings, QUANTIZATION_FIELDS, where, "quantization_config.")
    for name in ("hidden_size", "moe_intermediate_size"):
        if expert_dtype in ("fp4", None) and raw[name] % 2:
            raise CheckpointError(f"{where}: {name} is {raw[name]}; fp4 experts need an even number")
    if expert_dtype in UNQUANTIZED:
        return Quantization("fp8", "")
    if expert_dtype == "fp8":
        return Quantization("fp8", "fp8")
    return Quantization("fp8", "fp4", experts_stated=expert_dtype is not None)


def _yarn(raw: dict[str, Any], where: str) -> YarnScaling | None:
    name, scaling = "rope_scaling", raw.get("rope_scaling")
    if scaling is None and isinstance(raw.get("rope_parameters"), dict):
        name, scaling = "rope_parameters.compress", raw["rope_parameters"].get("compress")
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{where}: {name} is {scaling!r}; allowed is an object or null")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(f"{where}: {name}.type is {kind!r}; allowed is only 'yarn' or 'default'")
    values = read_fields(scaling, YARN_FIELDS, where, f"{name}.")
    if not values["original_max_position_embeddings"]:
        return None
    if values["beta_slow"] >= values["beta_fast"]:
        raise CheckpointError(
            f"{where}: {name}.beta_slow is {values['beta_slow']}; it must be below beta_fast = {values['beta_fast']}"
        )
    return YarnScaling(
        factor=float(values["factor"]),
        beta_fast=float(values["beta_fast"]),
        beta_slow=float(values["beta_slow"]),
        original_max_position=values["original_max_position_embeddings"],
    )
