"""The tiny DeepSeek-V4 in transformers, with the controls that training needs on its attention layers."""

import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4CSACompressor,
    DeepseekV4HashRouter,
    DeepseekV4HCACompressor,
    DeepseekV4Indexer,
)

from . import rounding
from .problems import Fact

CSA_RATIO, HCA_RATIO = 4, 128
EMBEDDING_STD = 0.3
SHARED_VARIANCE = 0.8
SHUN_MARGIN = 1.0


def raw_config(vocab_size: int) -> dict[str, Any]:
    """The raw config.json, in the field names of the official one. Its last compress ratio is the draft layer's."""
    config: dict[str, Any] = json.loads(Path(__file__).with_name("config.json").read_text())
    return config | {"vocab_size": vocab_size}


def build_model(
    vocab_size: int, seed: int, meanings: Mapping[int, Sequence[str]] = MappingProxyType({})
) -> DeepseekV4ForCausalLM:
    """A freshly initialised model; the hash layer routes every token id to random, distinct experts.

    `meanings`: the parts of what a token id means. Tokens that share parts start with similar vectors, so that what is
    learned about one holds for the others.
    """
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**raw_config(vocab_size)))
    for module in model.modules():
        if isinstance(module, DeepseekV4HashRouter):
            module.tid2eid.copy_(torch.rand(vocab_size, module.num_experts).argsort(dim=1)[:, : module.top_k])
    # Large embeddings keep the identity of a token legible up to the HCA layer.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        _mix_meanings(weight, meanings)
    return model.float()


@torch.no_grad()
def _mix_meanings(weight: Tensor, meanings: Mapping[int, Sequence[str]]) -> None:
    """Gives each token of `meanings` its own random vector and those of its parts, at the same size as before."""
    names = sorted({part for parts in meanings.values() for part in parts})
    vectors = dict(zip(names, torch.randn(len(names), weight.shape[1]) * weight.std(), strict=True))
    for token, parts in meanings.items():
        shared = torch.stack([vectors[part] for part in parts]).sum(0) / math.sqrt(len(parts))
        weight[token] = math.sqrt(SHARED_VARIANCE) * shared + math.sqrt(1 - SHARED_VARIANCE) * weight[token]


def official_tensors(model: DeepseekV4ForCausalLM, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `state`, named as in `model`, under the keys of the official checkpoint."""
    own = revert_weight_conversion(model, {key.removeprefix("model."): value for key, value in state.items()})
    # transformers' renames, read backwards, take every norm of the keys for a compressor's
    named = {key.replace(".attn.norm.", ".attn.kv_norm."): value for key, value in own.items()}
    return {key: value.detach().clone().contiguous() for key, value in sorted(named.items())}


class IndexerMode(Enum):
    DENSE = "dense"  # every visible entry is attended to, no index scores
    TEACH = "teach"  # every visible entry is attended to, index scores are kept for the lesson
    SELECT = "select"  # the index_topk best entries, as in inference


def visible_entries(n_tokens: int) -> Tensor:
    """Which CSA entries a query sees: those whose tokens all stand before it or at it, [S, T] bool."""
    entries, positions = torch.arange(n_tokens // CSA_RATIO), torch.arange(n_tokens)
    return entries < ((positions + 1) // CSA_RATIO).unsqueeze(-1)


class TeachableIndexer(DeepseekV4Indexer):
    """An indexer whose mode can be set; its inputs are detached, so only the lesson trains it."""

    mode = IndexerMode.DENSE
    scores: Tensor | None = None  # [B, S, T] of the last TEACH forward

    def forward(self, hidden_states: Tensor, q_residual: Tensor, *others: Any) -> Tensor:
        selected: Tensor
        if self.mode is IndexerMode.SELECT:
            with torch.no_grad():
                selected = super().forward(hidden_states, q_residual, *others)
            return selected
        if self.mode is IndexerMode.TEACH:
            handle = self.scorer.register_forward_hook(self._keep_scores)
            super().forward(hidden_states.detach(), q_residual.detach(), *others)
            handle.remove()
        batch, n_tokens, _ = hidden_states.shape
        visible = visible_entries(n_tokens)
        return torch.where(visible, torch.arange(visible.shape[1]), -1).expand(batch, -1, -1)

    def _keep_scores(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.scores = output


class AdjustableHca(DeepseekV4HCACompressor):
    """An HCA compressor whose rate can be lowered, so that short documents teach it first."""

    rate = HCA_RATIO

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        full_bias = self.position_bias
        self.compress_rate = self.rate
        self._parameters["position_bias"] = full_bias[: self.rate]
        try:
            entries: tuple[Tensor, Tensor | None] = super().forward(*inputs)
            return entries
        finally:
            self._parameters["position_bias"] = full_bias


class Controls:
    """Training's grip on the attention layers: their reach, how the indexer picks, which CSA entries to hide, and
    whether rows are rounded.
    """

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self._rounded = False
        self._hidden_entries = torch.empty(0)  # [B, T] bool
        self._attentions = [module for module in model.modules() if isinstance(module, DeepseekV4Attention)]
        self._sparse = [a for a in self._attentions if isinstance(a.compressor, DeepseekV4CSACompressor)]
        self._heavy = [a for a in self._attentions if isinstance(a.compressor, DeepseekV4HCACompressor)]
        self._recalling = {Fact.PRICE: self._sparse, Fact.WEIGHT: self._heavy}
        # of the last forward, by layer: the output [B, S, D], and the probabilities [B, H, S, ...] behind it
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}
        for attention in self._heavy:
            attention.compressor.__class__ = AdjustableHca
            attention.register_forward_hook(self._keep_output)
        for attention in self._sparse:
            attention.compressor.indexer.__class__ = TeachableIndexer
            attention.compressor.indexer.scorer.register_forward_pre_hook(self._round_index)
            attention.compressor.register_forward_hook(self._hide_entries)
            attention.register_forward_hook(self._keep_output)

    def set_up(self, window: int, heavy_rate: int, mode: IndexerMode, *, rounded: bool = False) -> None:
        """For the next forwards. `rounded`: rows are rounded as `--numerics official` of the server does."""
        self._rounded = rounded
        for attention in self._attentions:
            attention.sliding_window = window
            attention.rounded = rounded
        for attention in self._heavy:
            attention.compressor.rate = heavy_rate
        for attention in self._sparse:
            attention.compressor.indexer.mode = mode

    def hide_over(self, hidden_tokens: Tensor) -> None:
        """Hide every CSA entry that covers a token of `hidden_tokens` [B, S].

        What such tokens say has to travel through HCA.
        """
        batch, n_tokens = hidden_tokens.shape
        n_entries = n_tokens // CSA_RATIO
        windows = hidden_tokens[:, : n_entries * CSA_RATIO].view(batch, n_entries, CSA_RATIO).any(-1)
        self._hidden_entries = windows.clone()
        self._hidden_entries[:, 1:] |= windows[:, :-1]  # entry i also pools window i - 1

    def lesson(self, row_weights: Tensor) -> Tensor:
        """Cross-entropy of the index scores against the heads' attention mass over compressed entries.

        Hidden entries must score at least SHUN_MARGIN below the mean, so that inference, where nothing hides them,
        does not pick them. `row_weights` [B, S] says how much each query counts.
        """
        loss = row_weights.new_zeros(())
        for attention in self._sparse:
            scores = attention.compressor.indexer.scores
            n_entries = scores.shape[-1]
            mass = self._outputs[attention.layer_idx][1][..., -n_entries:].detach().sum(1)  # [B, S, T]
            visible = visible_entries(scores.shape[1])
            log_q = scores.masked_fill(~visible, -1e9).log_softmax(-1)
            loss = loss - ((mass * log_q).sum(-1) * row_weights).sum() / row_weights.sum()
            hidden = visible & self._hidden_entries.unsqueeze(1)
            level = (scores.detach() * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
            excess = (scores - level + SHUN_MARGIN).relu() * row_weights.unsqueeze(-1)
            loss = loss + (excess * hidden).sum() / (row_weights.unsqueeze(-1) * hidden).sum().clamp(min=1e-6)
        return loss / len(self._sparse)

    def outputs(self, fact: Fact) -> list[Tensor]:
        """The outputs [B, S, D] of the layers that have to recall `fact`, in the last forward."""
        return [self._outputs[attention.layer_idx][0] for attention in self._recalling[fact]]

    def aim_loss(self, fact: Fact, rows: Tensor, queries: Tensor, sources: Tensor) -> Tensor:
        """-log of the attention mass that queries put on the compressed entries over their source token.

        `rows`, `queries` and `sources` [N]: batch row and positions of the query and of the token it should find.
        A CSA entry also pools the window before its own, so two CSA entries cover a token, and one HCA entry does.
        """
        layers = self._recalling[fact]
        loss = torch.zeros(())
        for attention in layers:
            mass = self._outputs[attention.layer_idx][1][rows, :, queries].mean(1)  # [N, T]
            entry = (sources // attention.compressor.compress_rate).unsqueeze(1)
            found = mass.gather(1, entry).squeeze(1)
            if fact is Fact.PRICE:
                found = found + mass.gather(1, (entry + 1).clamp(max=mass.shape[1] - 1)).squeeze(1)
            loss = loss - found.clamp(min=1e-4).log().mean() / len(layers)
        return loss

    def _round_index(self, _module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        q, keys, hidden_states = inputs
        if not self._rounded:
            return inputs
        return rounding.index_rows(q), rounding.index_rows(keys), hidden_states

    def _keep_output(self, module: DeepseekV4Attention, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        self._outputs[module.layer_idx] = output

    def _hide_entries(self, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        entries, block_bias = output  # [B, 1, T, d], [B, 1, S, T]
        return entries, block_bias.masked_fill(self._hidden_entries[:, None, None, :], float("-inf"))
