"""The tensors of a checkpoint in the official format: every key with its shape and dtype, by the config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from server.model.blocks import FP4_BLOCK, WEIGHT_BLOCK
from server.model.config import CSA, HCA, SLIDING, DSpark, ModelConfig

NBYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
"""Bytes of one element, by the words of safetensors."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor as it is stored; ``dtype`` in safetensors' word."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NBYTES[self.dtype]


def official_tensors(config: ModelConfig, *, draft: bool = True) -> dict[str, TensorSpec]:
    """Every tensor by its key, in the order of the layers; with ``draft`` those of the draft too (``mtp.*``): of DSpark
    if the config has its fields, else of NextN.

    Without quantization every weight is BF16 and there are no scales. A backbone of V4-Flash with its draft is 69,187
    tensors of 159,609,485,896 bytes.
    """
    return _Table(config).whole(draft=draft)


class _Table:
    def __init__(self, config: ModelConfig) -> None:
        self.config, self.tensors = config, dict[str, TensorSpec]()

    def whole(self, *, draft: bool) -> dict[str, TensorSpec]:
        config = self.config
        self.plain("embed.weight", config.vocab_size, config.hidden_size)
        for layer_id, ratio in enumerate(config.compress_ratios):
            self.block(f"layers.{layer_id}.", ratio, is_hash=layer_id < config.num_hash_layers)
        self.head("")
        self.plain("head.weight", config.vocab_size, config.hidden_size)
        if draft and config.dspark is not None:
            self.dspark(config.dspark)
        elif draft:
            self.nextn("mtp.0.")
        return self.tensors

    def nextn(self, key: str) -> None:
        d = self.config.hidden_size
        self.block(key, SLIDING, is_hash=False)
        for name in ("enorm", "hnorm"):
            self.plain(f"{key}{name}.weight", d)
        for name in ("e_proj", "h_proj"):
            self.linear(f"{key}{name}", d, d, self.config.quantization.linears)
        self.head(key)

    def dspark(self, dspark: DSpark) -> None:
        """Stages that are blocks; the first one has the input side, the last one the output side."""
        config, last = self.config, dspark.stages - 1
        d, rank = config.hidden_size, dspark.markov_rank
        for stage in range(dspark.stages):
            key = f"mtp.{stage}."
            self.block(key, SLIDING, is_hash=False)
            if stage == 0:
                self.linear(f"{key}main_proj", d, len(dspark.target_layers) * d, config.quantization.linears)
                self.plain(f"{key}main_norm.weight", d)
            if stage == last:
                self.head(key)
                self.plain(f"{key}markov_head.markov_w1.weight", config.vocab_size, rank)
                self.plain(f"{key}markov_head.markov_w2.weight", config.vocab_size, rank)
                self.plain(f"{key}confidence_head.proj.weight", 1, d + rank)

    def head(self, key: str) -> None:
        n, d = self.config.hc_mult, self.config.hidden_size
        self.plain(f"{key}norm.weight", d)
        self.hyper_connection(f"{key}hc_head", n, 1, n * d)

    def block(self, key: str, ratio: int, *, is_hash: bool) -> None:
        n, d = self.config.hc_mult, self.config.hidden_size
        self.plain(f"{key}attn_norm.weight", d)
        self.plain(f"{key}ffn_norm.weight", d)
        for site in ("hc_attn", "hc_ffn"):
            self.hyper_connection(f"{key}{site}", (2 + n) * n, 3, n * d)
        self.attention(f"{key}attn.", ratio)
        self.experts(f"{key}ffn.", is_hash=is_hash)

    def hyper_connection(self, key: str, mix: int, scales: int, width: int) -> None:
        self.fp32(f"{key}_fn", mix, width)
        self.fp32(f"{key}_base", mix)
        self.fp32(f"{key}_scale", scales)

    def attention(self, key: str, ratio: int) -> None:
        config = self.config
        d, heads, quantized = config.hidden_size, config.num_attention_heads, config.quantization.linears
        low = config.o_groups * config.o_lora_rank
        self.fp32(f"{key}attn_sink", heads)
        self.plain(f"{key}q_norm.weight", config.q_lora_rank)
        self.plain(f"{key}kv_norm.weight", config.head_dim)
        self.linear(f"{key}wq_a", config.q_lora_rank, d, quantized)
        self.linear(f"{key}wq_b", heads * config.head_dim, config.q_lora_rank, quantized)
        self.linear(f"{key}wkv", config.head_dim, d, quantized)
        self.linear(f"{key}wo_a", low, heads * config.head_dim // config.o_groups, quantized)
        self.linear(f"{key}wo_b", d, low, quantized)
        if ratio in (CSA, HCA):
            self.compressor(f"{key}compressor.", ratio, config.head_dim)
        if ratio == CSA:
            self.linear(
                f"{key}indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank, quantized
            )
            self.plain(f"{key}indexer.weights_proj.weight", config.index_n_heads, d)
            self.compressor(f"{key}indexer.compressor.", CSA, config.index_head_dim)

    def compressor(self, key: str, ratio: int, width: int) -> None:
        both = (2 if ratio == CSA else 1) * width
        self.plain(f"{key}wkv.weight", both, self.config.hidden_size)
        self.plain(f"{key}wgate.weight", both, self.config.hidden_size)
        self.fp32(f"{key}ape", ratio, both)
        self.plain(f"{key}norm.weight", width)

    def experts(self, key: str, *, is_hash: bool) -> None:
        config = self.config
        self.plain(f"{key}gate.weight", config.n_routed_experts, config.hidden_size)
        if is_hash:
            self.tensors[f"{key}gate.tid2eid"] = TensorSpec((config.vocab_size, config.num_experts_per_tok), "I64")
        else:
            self.fp32(f"{key}gate.bias", config.n_routed_experts)
        for i in range(config.n_routed_experts):
            self.expert(f"{key}experts.{i}.", config.quantization.experts)
        self.expert(f"{key}shared_experts.", config.quantization.linears)

    def expert(self, key: str, quantized: str) -> None:
        d, inner = self.config.hidden_size, self.config.moe_intermediate_size
        self.linear(f"{key}w1", inner, d, quantized)
        self.linear(f"{key}w2", d, inner, quantized)
        self.linear(f"{key}w3", inner, d, quantized)

    # --- tensors ------------------------------------------------------------------------------------------------------

    def plain(self, key: str, *shape: int) -> None:
        self.tensors[key] = TensorSpec(shape, "BF16")

    def fp32(self, key: str, *shape: int) -> None:
        self.tensors[key] = TensorSpec(shape, "F32")

    def linear(self, key: str, n_out: int, n_in: int, quantized: str) -> None:
        """``quantized``: ``fp8``, ``fp4`` or nothing."""
        if quantized == "fp8":
            scale = -(-n_out // WEIGHT_BLOCK), -(-n_in // WEIGHT_BLOCK)
            stored, dtype = (n_out, n_in), "F8_E4M3"
        elif quantized == "fp4":
            scale = n_out, -(-n_in // FP4_BLOCK)
            stored, dtype = (n_out, n_in // 2), "I8"
        else:
            return self.plain(f"{key}.weight", n_out, n_in)
        self.tensors[f"{key}.weight"] = TensorSpec(stored, dtype)
        self.tensors[f"{key}.scale"] = TensorSpec(scale, "F8_E8M0")
        return None
