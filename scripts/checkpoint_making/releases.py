"""What the ``config.json`` of the official releases say: the sizes that differ, and what all have in common."""

from __future__ import annotations

from typing import Any

from server.model.config import CSA, HCA, SLIDING

FLASH, PRO = "flash", "pro"
NAMES = (FLASH, PRO)
"""The releases with a NextN draft."""

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_SIZES: dict[str, dict[str, Any]] = {
    FLASH: {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "routed_scaling_factor": 1.5,
        "index_topk": 512,
    },
    PRO: {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.5,
        "index_topk": 1024,
    },
}
_FIRST_LAYERS = {FLASH: [SLIDING, SLIDING], PRO: [HCA, HCA]}
_SHARED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129_280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 10_000,
    "compress_rope_theta": 160_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1 << 16,
    },
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
    "quantization_config": QUANTIZATION,
    "expert_dtype": "fp4",
}


def config_of_release(name: str) -> dict[str, Any]:
    """The fields of ``config.json`` of one of :data:`NAMES`. CSA and HCA layers take turns; the last is CSA, and
    behind it the draft's entry.
    """
    sizes, first = _SIZES[name], _FIRST_LAYERS[name]
    n_pairs = (sizes["num_hidden_layers"] - len(first) - 1) // 2
    ratios = [*first, *[CSA, HCA] * n_pairs, CSA, SLIDING]
    return {**_SHARED, **sizes, "compress_ratios": ratios}
