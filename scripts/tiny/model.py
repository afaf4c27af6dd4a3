"""The tiny DeepSeek-V4 in transformers, with the controls that training needs on its attention layers."""

from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4CSACompressor,
    DeepseekV4HashRouter,
    DeepseekV4HCACompressor,
    DeepseekV4Indexer,
)

from .problems import Fact

CSA_RATIO, HCA_RATIO = 4, 128
EMBEDDING_STD = 0.3
SHUN_MARGIN = 1.0

# The raw config.json, in the field names of the official one. The last compress ratio is the draft layer's.
RAW_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hc_eps": 1e-06,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "index_topk": 16,
    "initializer_range": 0.05,
    "max_position_embeddings": 8192,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 512,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 64,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 0,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 128, 4, 0],
}


def raw_config(vocab_size: int) -> dict[str, Any]:
    return RAW_CONFIG | {"vocab_size": vocab_size}


def build_model(vocab_size: int, seed: int) -> DeepseekV4ForCausalLM:
    """A freshly initialised model; the hash layer routes every token id to random, distinct experts."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**raw_config(vocab_size)))
    for module in model.modules():
        if isinstance(module, DeepseekV4HashRouter):
            module.tid2eid.copy_(torch.rand(vocab_size, module.num_experts).argsort(dim=1)[:, : module.top_k])
    # Large embeddings keep the identity of a token legible up to the HCA layer.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    return model.float()


class IndexerMode(Enum):
    DENSE = "dense"  # every visible entry is attended to, no index scores
    TEACH = "teach"  # every visible entry is attended to, index scores are kept for the lesson
    SELECT = "select"  # the index_topk best entries, as in inference


class TeachableIndexer(DeepseekV4Indexer):
    """An indexer whose mode can be set; its inputs are detached, so only the lesson trains it."""

    mode = IndexerMode.DENSE
    scores: Tensor | None = None  # [B, S, T] of the last TEACH forward

    def forward(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
    ) -> Tensor:
        if cache is not None:
            return super().forward(hidden_states, q_residual, position_ids, cache, layer_idx)
        if self.mode is IndexerMode.SELECT:
            with torch.no_grad():
                return super().forward(hidden_states, q_residual, position_ids, None, layer_idx)
        if self.mode is IndexerMode.TEACH:
            handle = self.scorer.register_forward_hook(self._keep_scores)
            super().forward(hidden_states.detach(), q_residual.detach(), position_ids, None, layer_idx)
            handle.remove()
        batch, n_tokens, _ = hidden_states.shape
        entries = torch.arange(n_tokens // self.compress_rate, device=hidden_states.device)
        visible = entries < ((position_ids + 1) // self.compress_rate).unsqueeze(-1)  # [1, S, T]
        return torch.where(visible, entries, -1).expand(batch, -1, -1)

    def _keep_scores(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.scores = output


class AdjustableHca(DeepseekV4HCACompressor):
    """An HCA compressor whose rate can be lowered, so that short documents teach it first."""

    rate = HCA_RATIO

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        full_bias = self.position_bias
        self.compress_rate = self.rate
        self._parameters["position_bias"] = full_bias[: self.rate]  # type: ignore[assignment]
        try:
            return super().forward(*inputs)
        finally:
            self._parameters["position_bias"] = full_bias


class Controls:
    """Training's grip on the attention layers: their reach, how the indexer picks, which CSA entries to hide."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.hidden_entries: Tensor | None = None  # [B, T] bool
        self._attentions = [module for module in model.modules() if isinstance(module, DeepseekV4Attention)]
        self._sparse = [a for a in self._attentions if isinstance(a.compressor, DeepseekV4CSACompressor)]
        self._heavy = [a for a in self._attentions if isinstance(a.compressor, DeepseekV4HCACompressor)]
        self._weights: dict[int, Tensor] = {}
        self.outputs: dict[Fact, list[Tensor]] = {Fact.PRICE: [], Fact.WEIGHT: []}  # [B, S, D] of the last forward
        for attention in self._heavy:
            attention.compressor.__class__ = AdjustableHca
            attention.register_forward_hook(partial(self._keep_output, Fact.WEIGHT))
            attention.register_forward_hook(self._keep_attention)
        for attention in self._sparse:
            attention.compressor.indexer.__class__ = TeachableIndexer
            attention.compressor.register_forward_hook(self._hide_entries)
            attention.register_forward_hook(partial(self._keep_output, Fact.PRICE))
            attention.register_forward_hook(self._keep_attention)

    def set_reach(self, window: int, heavy_rate: int) -> None:
        for attention in self._attentions:
            attention.sliding_window = window
        for attention in self._heavy:
            attention.compressor.rate = heavy_rate

    def set_mode(self, mode: IndexerMode) -> None:
        for attention in self._sparse:
            attention.compressor.indexer.mode = mode

    def hide_over(self, hidden_tokens: Tensor) -> None:
        """Hide every CSA entry that covers a token of `hidden_tokens` [B, S].

        What such tokens say has to travel through HCA.
        """
        batch, n_tokens = hidden_tokens.shape
        n_entries = n_tokens // CSA_RATIO
        windows = hidden_tokens[:, : n_entries * CSA_RATIO].view(batch, n_entries, CSA_RATIO).any(-1)
        self.hidden_entries = windows.clone()
        self.hidden_entries[:, 1:] |= windows[:, :-1]  # entry i also pools window i - 1

    def lesson(self, row_weights: Tensor) -> Tensor:
        """Cross-entropy of the index scores against the heads' attention mass over compressed entries.

        Hidden entries must score at least SHUN_MARGIN below the mean, so that inference, where nothing hides them,
        does not pick them. `row_weights` [B, S] says how much each query counts.
        """
        loss = row_weights.new_zeros(())
        for attention in self._sparse:
            scores = attention.compressor.indexer.scores
            n_entries = scores.shape[-1]
            mass = self._weights[attention.layer_idx][..., -n_entries:].detach().sum(1)  # [B, S, T]
            entries = torch.arange(n_entries)
            visible = entries < ((torch.arange(scores.shape[1]) + 1) // CSA_RATIO).unsqueeze(-1)
            log_q = scores.masked_fill(~visible, -1e9).log_softmax(-1)
            loss = loss - ((mass * log_q).sum(-1) * row_weights).sum() / row_weights.sum()
            hidden = visible & self.hidden_entries.unsqueeze(1)
            level = (scores.detach() * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
            excess = (scores - level + SHUN_MARGIN).relu() * row_weights.unsqueeze(-1)
            loss = loss + (excess * hidden).sum() / (row_weights.unsqueeze(-1) * hidden).sum().clamp(min=1e-6)
        return loss / len(self._sparse)

    def _hide_entries(self, _module: nn.Module, _inputs: Any, output: tuple) -> tuple | None:
        if self.hidden_entries is None:
            return None
        entries, block_bias = output  # [B, 1, T, d], [B, 1, S, T]
        return entries, block_bias.masked_fill(self.hidden_entries[:, None, None, :], float("-inf"))

    def take_outputs(self, fact: Fact) -> list[Tensor]:
        """The outputs [B, S, D] of the layers that have to recall `fact`, since the last call."""
        outputs, self.outputs[fact] = self.outputs[fact], []
        return outputs

    def aim_loss(self, fact: Fact, rows: Tensor, queries: Tensor, sources: Tensor) -> Tensor:
        """-log of the attention mass that queries put on the compressed entries over their source token.

        `rows`, `queries` and `sources` [N]: batch row and positions of the query and of the token it should find.
        A CSA entry also pools the window before its own, so two CSA entries cover a token, and one HCA entry does.
        """
        layers = self._sparse if fact is Fact.PRICE else self._heavy
        loss = torch.zeros(())
        for attention in layers:
            mass = self._weights[attention.layer_idx][rows, :, queries].mean(1)  # [N, T]
            entry = (sources // attention.compressor.compress_rate).unsqueeze(1)
            found = mass.gather(1, entry).squeeze(1)
            if fact is Fact.PRICE:
                found = found + mass.gather(1, (entry + 1).clamp(max=mass.shape[1] - 1)).squeeze(1)
            loss = loss - found.clamp(min=1e-4).log().mean() / len(layers)
        return loss

    def _keep_output(self, fact: Fact, _module: nn.Module, _inputs: Any, output: tuple) -> None:
        self.outputs[fact].append(output[0])

    def _keep_attention(self, module: DeepseekV4Attention, _inputs: Any, output: tuple) -> None:
        self._weights[module.layer_idx] = output[1]
