"""Which state components a DeepSeek-V4 model has: the table that makes pools, manifests and transfers."""

from __future__ import annotations

from server.cache.row_formats import (
    AUTO,
    FP8,
    FP8_INDEX,
    FP8_KV,
    MODEL,
    MXFP4,
    MXFP4_INDEX,
    Fp8IndexRow,
    Fp8KvRow,
    Mxfp4IndexRow,
    chosen_index_dtype,
)
from server.cache.specs import ComponentSpec, LayoutError, Scope, handoff_spec
from server.model.config import CSA, HCA, ModelConfig


def state_components(
    config: ModelConfig,
    dtype: str,
    spec_tokens: int = 0,
    *,
    draft: bool = False,
    kv_dtype: str = MODEL,
    index_dtype: str = AUTO,
) -> tuple[ComponentSpec, ...]:
    """Every component of one request's state, with rings long enough to undo ``spec_tokens`` rejected draft tokens.

    With ``draft`` the NextN layer's own window is one more component, beside the target's and never part of it.
    ``dtype`` is the model's. ``kv_dtype`` (one of :data:`.row_formats.KV_DTYPES`) says how windows and compressed
    entries are stored, ``index_dtype`` (one of :data:`.row_formats.INDEX_DTYPES`) how the indexer's keys are. Raises
    :class:`LayoutError` for other words.

    Compressor states keep one fp32 row per token, ``[kv | score]`` with the position bias ``ape`` already in the score;
    CSA states come in two halves because they live for different times: A is pooled into the next window's entry, B
    into its own.
    """
    d, di = config.head_dim, config.index_head_dim
    kv_width, kv_format = _kv_row(config, dtype, kv_dtype)
    index_width, index_format = _index_row(config, dtype, chosen_index_dtype(kv_dtype, index_dtype))
    csa, hca = config.layers_of(CSA), config.layers_of(HCA)
    every = tuple(range(config.num_hidden_layers))
    page = [
        ComponentSpec("c4_kv", Scope.PAGE, CSA, csa, kv_width, kv_format),
        ComponentSpec("c4_index", Scope.PAGE, CSA, csa, index_width, index_format),
        ComponentSpec("c128_kv", Scope.PAGE, HCA, hca, kv_width, kv_format),
    ]
    ring = config.sliding_window + spec_tokens
    slot = [ComponentSpec("swa", Scope.SLOT, 1, every, kv_width, kv_format, ring)]
    for half in ("a", "b"):
        slot.append(ComponentSpec(f"c4_state_{half}", Scope.SLOT, 1, csa, 2 * d, "float32", 2 * CSA + spec_tokens))
    for half in ("a", "b"):
        slot.append(
            ComponentSpec(f"c4_index_state_{half}", Scope.SLOT, 1, csa, 2 * di, "float32", 2 * CSA + spec_tokens)
        )
    slot.append(ComponentSpec("c128_state", Scope.SLOT, 1, hca, 2 * d, "float32", HCA + spec_tokens))
    if draft:
        slot.append(ComponentSpec("draft_swa", Scope.SLOT, 1, (config.num_hidden_layers,), kv_width, kv_format, ring))
    layered = tuple(spec for spec in page + slot if spec.layer_ids)
    return (*layered, handoff_spec(config.hc_mult, config.hidden_size, dtype))


def fp8_kv_row(config: ModelConfig) -> Fp8KvRow:
    """An ``fp8_kv`` row of ``config``: the rope channels are the last ones of a head."""
    return Fp8KvRow(config.head_dim - config.rope_dim, config.rope_dim)


def _kv_row(config: ModelConfig, dtype: str, kv_dtype: str) -> tuple[int, str]:
    """Elements and format of one layer's window row or compressed entry."""
    if kv_dtype == MODEL:
        return config.head_dim, dtype
    if kv_dtype == FP8:
        return fp8_kv_row(config).nbytes, FP8_KV
    raise LayoutError(f"{kv_dtype!r} is no format of KV rows")


def _index_row(config: ModelConfig, dtype: str, index_dtype: str) -> tuple[int, str]:
    """Elements and format of one layer's indexer key."""
    width = config.index_head_dim
    if index_dtype == MODEL:
        return width, dtype
    if index_dtype == FP8:
        return Fp8IndexRow(width).nbytes, FP8_INDEX
    if index_dtype == MXFP4:
        return Mxfp4IndexRow(width).nbytes, MXFP4_INDEX
    raise LayoutError(f"{index_dtype!r} is no format of the indexer's keys")
