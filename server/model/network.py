"""The backbone: embedding, blocks of attention and experts between hyper-connected streams, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from server.model.attention import Attention, RopeSet
from server.model.batch import Batch
from server.model.config import ModelConfig
from server.model.layers import HeadCollapse, HyperConnection, Linear, RMSNorm
from server.model.moe import MoE
from server.model.pools import Pools
from server.model.rope import rope_frequencies


class Block(nn.Module):
    """One layer: attention, then experts, each between an mHC collapse and expansion. Keys ``layers.<id>.*``."""

    def __init__(self, config: ModelConfig, layer_id: int, row_tile: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer_id, config.compress_ratios[layer_id], row_tile, dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, layer_id, row_tile, dtype)
        self.hc_attn = _hyper_connection(config, row_tile)
        self.hc_ffn = _hyper_connection(config, row_tile)

    def forward(self, streams: torch.Tensor, batch: Batch, pools: Pools, rope: RopeSet) -> torch.Tensor:
        """Streams ``[rows, N, D]`` -> ``[rows, N, D]``."""
        x, post, comb = self.hc_attn.collapse(streams)
        streams = self.hc_attn.expand(self.attn(self.attn_norm(x), batch, pools, rope), streams, post, comb)
        x, post, comb = self.hc_ffn.collapse(streams)
        out = self.ffn(self.ffn_norm(x), batch.token_ids, batch.n_rows)
        return self.hc_ffn.expand(out, streams, post, comb)


@dataclass(frozen=True)
class ForwardOutput:
    """``logits`` ``[requested rows, vocab]`` in fp32; ``streams`` ``[requested rows, N, D]``: the last block's
    output.
    """

    logits: torch.Tensor
    streams: torch.Tensor


class DeepseekV4(nn.Module):
    """The target model. ``row_tile`` > 0 makes every row's result independent of the batch (see
    ``layers.matmul_rows``).
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, row_tile: int) -> None:
        super().__init__()
        self.config, self.dtype, self.row_tile = config, dtype, row_tile
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList([Block(config, i, row_tile, dtype) for i in range(config.num_hidden_layers)])
        self.hc_head = HeadCollapse(config.hc_mult, config.hidden_size, config.hc_eps, config.rms_norm_eps, row_tile)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, row_tile, torch.float32)
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, batch: Batch, pools: Pools, rows: torch.Tensor | None = None) -> ForwardOutput:
        """Runs one batch, reading and writing ``pools``. ``rows`` are those whose logits are wanted; None means every
        real row.
        """
        if self._rope is None:
            main, compress = rope_frequencies(self.config)
            self._rope = main.to(batch.positions.device), compress.to(batch.positions.device)
        rope = RopeSet(batch, *self._rope)
        streams = self.embed(batch.token_ids).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for block in self.layers:
            streams = block(streams, batch, pools, rope)
        wanted = torch.arange(batch.n_rows, device=streams.device) if rows is None else rows
        padding = -wanted.shape[0] % self.row_tile if self.row_tile else 0
        picked = streams[nn.functional.pad(wanted, (0, padding))]
        logits = self.head(self.norm(self.hc_head(picked)).float())
        return ForwardOutput(logits[: wanted.shape[0]], picked[: wanted.shape[0]])


def _hyper_connection(config: ModelConfig, row_tile: int) -> HyperConnection:
    return HyperConnection(
        config.hc_mult, config.hidden_size, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps, row_tile
    )
