"""What every field of ``config.json`` may hold: one table, checked when a checkpoint is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SLIDING, CSA, HCA = 0, 4, 128
"""Compress ratios, which name the three kinds of layer: window only, compressed sparse, heavily compressed."""

UNQUANTIZED = ("bf16", "bfloat16", "fp32", "float32")
QUANTIZED = ("fp8", "fp4")
"""What ``expert_dtype`` may say."""


class CheckpointError(ValueError):
    """A model directory that cannot be served; the message names the file, key or field and what to do."""


@dataclass(frozen=True)
class Field:
    """One field: ``allowed`` says in words what ``fits`` accepts. A missing field has the value ``default``, or is an
    error if that is ``...``.
    """

    allowed: str
    fits: Callable[[Any], bool]
    default: Any = ...


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _int(low: int, high: int | None = None, default: Any = ...) -> Field:
    words = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return Field(words, lambda v: _is_int(v) and low <= v and (high is None or v <= high), default)


def _even(low: int, high: int) -> Field:
    return Field(f"an even number from {low} to {high}", lambda v: _is_int(v) and low <= v <= high and v % 2 == 0)


def _number(words: str, fits: Callable[[float], bool], default: Any = ...) -> Field:
    return Field(words, lambda v: _is_number(v) and fits(v), default)


def _only(*values: Any, default: Any = ...) -> Field:
    """Only these values are computed; a number is no truth value and the other way round."""
    words = "only " + " or ".join(repr(v) for v in values)
    return Field(words, lambda v: any(v == x and isinstance(v, bool) == isinstance(x, bool) for x in values), default)


def _above_zero(default: Any = ...) -> Field:
    return _number("a number above 0", lambda v: v > 0, default)


_MOST = (1 << 31) - 1

FIELDS: dict[str, Field] = {
    "vocab_size": _int(1, _MOST),
    "hidden_size": _int(1, _MOST),
    "num_hidden_layers": _int(1, 1024),
    "num_attention_heads": _int(1, 4096),
    "num_key_value_heads": _only(1, default=1),
    "head_dim": _even(2, 65536),
    "qk_rope_head_dim": _even(2, 65536),
    "q_lora_rank": _int(1, _MOST),
    "o_groups": _int(1, 4096),
    "o_lora_rank": _int(1, _MOST),
    "moe_intermediate_size": _int(1, _MOST),
    "n_routed_experts": _int(1, 4096),
    "num_experts_per_tok": _int(1, 4096),
    "n_shared_experts": _only(1, default=1),
    "num_hash_layers": _int(0, 1024),
    "scoring_func": _only("sqrtsoftplus", default="sqrtsoftplus"),
    "topk_method": _only("noaux_tc", default="noaux_tc"),
    "norm_topk_prob": _only(True, default=True),
    "routed_scaling_factor": _above_zero(1.5),
    "swiglu_limit": _number("a number of at least 0 (0: no clamp)", lambda v: v >= 0, 10.0),
    "index_n_heads": _int(1, 4096),
    "index_head_dim": _even(2, 65536),
    "index_topk": _int(1, _MOST),
    "sliding_window": _int(1, 1 << 20),
    "hc_mult": _int(1, 64),
    "hc_sinkhorn_iters": _int(1, 1000),
    "hc_eps": _number("a number of at least 0 and below 1", lambda v: 0 <= v < 1, 1e-6),
    "rms_norm_eps": _number("a number of at least 0 and below 1", lambda v: 0 <= v < 1, 1e-6),
    "rope_theta": _number("a number above 1", lambda v: v > 1, 10000.0),
    "compress_rope_theta": _number("a number above 1", lambda v: v > 1, 160000.0),
    "max_position_embeddings": _int(2, _MOST),
    "compress_ratios": Field(
        f"a list of {SLIDING} (window only), {CSA} (CSA) and {HCA} (HCA)",
        lambda v: isinstance(v, list) and all(_is_int(r) and r in (SLIDING, CSA, HCA) for r in v),
    ),
    "num_nextn_predict_layers": _int(0, 64, default=0),
    "tie_word_embeddings": _only(False, default=False),
    "attention_bias": _only(False, default=False),
    "mlp_bias": _only(False, default=False),
    "hidden_act": _only("silu", default="silu"),
    "expert_dtype": _only(*UNQUANTIZED, *QUANTIZED, None, default=None),
    "dspark_block_size": _int(0, 1024, default=0),
    "dspark_markov_rank": _int(1, _MOST, default=256),
    "dspark_noise_token_id": _int(0, _MOST, default=0),
    "dspark_target_layer_ids": Field(
        "a list of layer numbers, ascending",
        lambda v: isinstance(v, list) and all(_is_int(i) and i >= 0 for i in v) and v == sorted(set(v)),
        default=(),
    ),
}
"""Every field of ``config.json`` that this server reads, in its official name. Others change no result."""

YARN_FIELDS: dict[str, Field] = {
    "factor": _number("a number of at least 1", lambda v: v >= 1),
    "beta_fast": _above_zero(32),
    "beta_slow": _above_zero(1),
    "original_max_position_embeddings": _int(0, _MOST),
    "attention_factor": _only(1, None, default=None),
}
"""Fields of ``rope_scaling`` with type ``yarn``; an original context of 0 means no scaling, as in the reference."""

QUANTIZATION_FIELDS: dict[str, Field] = {
    "quant_method": _only("fp8"),
    "fmt": _only("e4m3", default="e4m3"),
    "scale_fmt": _only("ue8m0", default="ue8m0"),
    "activation_scheme": _only("dynamic", default="dynamic"),
    "weight_block_size": _only([128, 128], default=[128, 128]),
}
"""Fields of ``quantization_config``: what the official checkpoints say. Others are not read."""


def read_fields(raw: Mapping[str, Any], table: Mapping[str, Field], where: str, prefix: str = "") -> dict[str, Any]:
    """The value of every field of ``table``, out of ``raw``. Raises :class:`CheckpointError` that names the first bad
    one.
    """
    values = {}
    for name, field in table.items():
        value = raw.get(name, field.default)
        if value is ...:
            raise CheckpointError(f"{where}: {prefix}{name} is missing; it must be {field.allowed}")
        if value is not field.default and not field.fits(value):
            raise CheckpointError(f"{where}: {prefix}{name} is {_shown(value)}; allowed is {field.allowed}")
        values[name] = value
    return values


def check_together(values: Mapping[str, Any], where: str) -> None:
    """The rules between fields. Raises :class:`CheckpointError` that names both."""
    n_layers, ratios = values["num_hidden_layers"], values["compress_ratios"]
    if len(ratios) < n_layers:
        raise CheckpointError(
            f"{where}: compress_ratios has {len(ratios)} entries; there must be one for each of num_hidden_layers = "
            f"{n_layers}, and may be one more for each draft layer"
        )
    for small, large in (
        ("qk_rope_head_dim", "head_dim"),
        ("qk_rope_head_dim", "index_head_dim"),
        ("num_experts_per_tok", "n_routed_experts"),
        ("num_hash_layers", "num_hidden_layers"),
    ):
        if values[small] > values[large]:
            raise CheckpointError(f"{where}: {small} is {values[small]}; it may be at most {large} = {values[large]}")
    heads, groups = values["num_attention_heads"], values["o_groups"]
    if heads % groups:
        raise CheckpointError(f"{where}: o_groups is {groups}; it must divide num_attention_heads = {heads}")
    if values["dspark_block_size"]:
        _check_dspark(values, where)


def _check_dspark(values: Mapping[str, Any], where: str) -> None:
    n_layers, targets = values["num_hidden_layers"], values["dspark_target_layer_ids"]
    stages = values["compress_ratios"][n_layers:]
    if not stages or any(stages):
        raise CheckpointError(
            f"{where}: compress_ratios ends with {stages} behind the layers; a DSpark draft needs a {SLIDING} there "
            "for each of its stages"
        )
    if not targets or targets[-1] >= n_layers:
        raise CheckpointError(
            f"{where}: dspark_target_layer_ids is {list(targets)}; it must name layers below num_hidden_layers = "
            f"{n_layers}"
        )
    if (noise := values["dspark_noise_token_id"]) >= values["vocab_size"]:
        raise CheckpointError(
            f"{where}: dspark_noise_token_id is {noise}; it must be below vocab_size = {values['vocab_size']}"
        )


def saved_by_transformers(where: str, evidence: str) -> CheckpointError:
    """What to say of a directory with transformers' names."""
    return CheckpointError(
        f"{where}: this was written by transformers (save_pretrained): {evidence}. This server reads the official "
        "names of fields and tensors: use the checkpoint that the model was loaded from"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
