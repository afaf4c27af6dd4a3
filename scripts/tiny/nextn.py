"""The NextN draft layer for training: differentiable, from transformers' modules, and only where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    apply_rotary_pos_emb,
)

from .model import official_tensors

PREFIX = "mtp.0."

Rope = tuple[Tensor, Tensor]  # cos and sin [1, R, rope_dim / 2]


class RowAttention(DeepseekV4Attention):
    """Window-only attention of R single rows, each over its own W key rows."""

    def key_rows(self, x: Tensor, rope: Rope) -> Tensor:
        """`x` [B, R, D] (normed) -> the rows' keys (= values) [B, R, d]."""
        keys: Tensor = apply_rotary_pos_emb(self.kv_norm(self.kv_proj(x)).unsqueeze(1), *rope)
        return keys.squeeze(1)

    def forward(self, x: Tensor, rope: Rope, keys: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        """`x` [1, R, D] (normed) over `keys` [R, W, d], of which `mask` [R, W] says which are there -> [1, R, D]."""
        n_rows = x.shape[1]
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).view(1, n_rows, -1, self.head_dim)
        q = apply_rotary_pos_emb(self.q_b_norm(q).transpose(1, 2), *rope)[0].transpose(0, 1)  # [R, H, d]
        scores = (q @ keys.transpose(1, 2) * self.scaling).masked_fill(~mask[:, None], float("-inf"))
        sinks = self.sinks.view(1, -1, 1).expand(n_rows, -1, 1)
        out = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ keys  # [R, H, d]
        cos, sin = rope
        out = apply_rotary_pos_emb(out.transpose(0, 1)[None], cos, -sin).transpose(1, 2)  # [1, R, H, d]
        grouped = self.o_a_proj(out.reshape(1, n_rows, self.config.o_groups, -1)).flatten(2)
        return self.o_b_proj(grouped), None


class NextN(DeepseekV4DecoderLayer):
    """The layer of dsv4.md 4.1: a window-only block with top-k experts behind the mixing of its two inputs."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config, 0)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn.__class__ = RowAttention
        self.enorm, self.hnorm = DeepseekV4RMSNorm(d, eps), DeepseekV4RMSNorm(d, eps)
        self.e_proj, self.h_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.hc_head = DeepseekV4HyperHead(config)
        self.norm = DeepseekV4RMSNorm(d, eps)

    @classmethod
    def beside(cls, target: DeepseekV4ForCausalLM, raw_config: dict[str, Any]) -> NextN:
        """A new layer that starts from the target's last one, with the target's streams passed through unchanged."""
        layer = cls(DeepseekV4Config(**raw_config | _ONE_WINDOW_LAYER, experts_implementation="eager"))
        backbone = target.model
        last = backbone.layers[-1].state_dict()
        own = layer.state_dict()
        layer.load_state_dict(own | {key: value for key, value in last.items() if key in own})
        layer.hc_head.load_state_dict(backbone.hc_head.state_dict())
        layer.norm.load_state_dict(backbone.norm.state_dict())
        with torch.no_grad():
            layer.h_proj.weight.copy_(torch.eye(layer.h_proj.in_features))
            layer.e_proj.weight.copy_(0.3 * torch.eye(layer.e_proj.in_features))
        return layer

    def mix(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """Embedding of t + 1 [B, R, D] and streams of t [B, R, N, D] -> the block's input [B, R, N, D]."""
        mixed: Tensor = self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(streams))
        return mixed

    def key_rows(self, mixed: Tensor, rope: Rope) -> Tensor:
        """The window rows [B, R, d] of `mixed` [B, R, N, D]."""
        _, _, x = self.attn_hc(mixed)
        return cast(RowAttention, self.self_attn).key_rows(self.input_layernorm(x), rope)

    def official(self) -> dict[str, Tensor]:
        """The layer's tensors under the keys of the official checkpoint."""
        with torch.device("meta"):
            names = DeepseekV4ForCausalLM(self.self_attn.config)
        tensors = official_tensors(names, {PREFIX + key: value for key, value in self.state_dict().items()})
        return {key.replace("hc_head.hc_", "hc_head_"): tensor for key, tensor in tensors.items()}


_ONE_WINDOW_LAYER = {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}


@dataclass(frozen=True)
class Anchors:
    """Where chains start: document and position [R] of the last token that the target has seen."""

    documents: Tensor
    positions: Tensor


class Drafter:
    """Draft chains over whole documents, exactly as decoding would draft from each anchor (dsv4.md 4.3)."""

    def __init__(self, layer: NextN, target: DeepseekV4ForCausalLM) -> None:
        self.layer, self.target = layer, target
        self.window = int(target.config.sliding_window)

    def chains(self, ids: Tensor, streams: Tensor, anchors: Anchors, depth: int) -> list[Tensor]:
        """`ids` [B, S] and the target's streams [B, S, N, D] -> the logits [R, V] of each of `depth` drafted tokens.

        The first row of a chain reads the target's streams, later ones the layer's own output and the true token.
        Every position up to an anchor has its window row from the target's streams, later ones from the chain.
        """
        layer, b, p = self.layer, anchors.documents, anchors.positions
        last = ids.shape[1] - 1
        embedded = self.target.model.embed_tokens(ids)
        mixed = layer.mix(embedded[:, 1:], streams[:, :-1])
        rows = layer.key_rows(mixed, self._rope(torch.arange(last)))
        seen = p.unsqueeze(1) + torch.arange(1 - self.window, 1)  # [R, W]
        keys, mask = rows[b.unsqueeze(1), seen.clamp(min=0)], seen >= 0
        x = mixed[b, p].unsqueeze(0)

        logits = []
        for step in range(depth):
            rope = self._rope(p + step)
            if step:
                x = layer.mix(embedded[b, (p + step + 1).clamp(max=last)].unsqueeze(0), x)
                own = layer.key_rows(x, rope)[0].unsqueeze(1)
                keys = torch.cat([keys[:, 1:], own], dim=1)
                mask = torch.cat([mask[:, 1:], torch.ones_like(mask[:, :1])], dim=1)
            x = layer(x, rope=rope, keys=keys, mask=mask)
            logits.append(self.target.lm_head(layer.norm(layer.hc_head(x)))[0])
        return logits

    def _rope(self, positions: Tensor) -> Rope:
        rope: Rope = self.target.model.rotary_emb(torch.empty(0), positions.unsqueeze(0), layer_type="main")
        return rope
