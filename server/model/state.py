"""Which state components a DeepSeek-V4 model has: the table that makes pools, manifests and transfers."""

from __future__ import annotations

from server.cache.specs import ComponentSpec, Scope, handoff_spec
from server.model.config import CSA, HCA, ModelConfig


def state_components(
    config: ModelConfig, kv_dtype: str, spec_tokens: int = 0, *, draft: bool = False
) -> tuple[ComponentSpec, ...]:
    """Every component of one request's state, with rings long enough to undo ``spec_tokens`` rejected draft tokens.

    With ``draft`` the NextN layer's own window is one more component, beside the target's and never part of it.

    Compressor states keep one fp32 row per token, ``[kv | score]`` with the position bias ``ape`` already in the score;
    CSA states come in two halves because they live for different times: A is pooled into the next window's entry, B
    into its own.
    """
    d, di = config.head_dim, config.index_head_dim
    csa, hca = config.layers_of(CSA), config.layers_of(HCA)
    every = tuple(range(config.num_hidden_layers))
    page = [
        ComponentSpec("c4_kv", Scope.PAGE, CSA, csa, d, kv_dtype),
        ComponentSpec("c4_index", Scope.PAGE, CSA, csa, di, kv_dtype),
        ComponentSpec("c128_kv", Scope.PAGE, HCA, hca, d, kv_dtype),
    ]
    slot = [ComponentSpec("swa", Scope.SLOT, 1, every, d, kv_dtype, config.sliding_window + spec_tokens)]
    for half in ("a", "b"):
        slot.append(ComponentSpec(f"c4_state_{half}", Scope.SLOT, 1, csa, 2 * d, "float32", 2 * CSA + spec_tokens))
    for half in ("a", "b"):
        slot.append(
            ComponentSpec(f"c4_index_state_{half}", Scope.SLOT, 1, csa, 2 * di, "float32", 2 * CSA + spec_tokens)
        )
    slot.append(ComponentSpec("c128_state", Scope.SLOT, 1, hca, 2 * d, "float32", HCA + spec_tokens))
    if draft:
        ring = config.sliding_window + spec_tokens
        slot.append(ComponentSpec("draft_swa", Scope.SLOT, 1, (config.num_hidden_layers,), d, kv_dtype, ring))
    layered = tuple(spec for spec in page + slot if spec.layer_ids)
    return (*layered, handoff_spec(config.hc_mult, config.hidden_size, kv_dtype))
