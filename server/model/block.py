"""One layer of the network, and the NextN draft layer, which is one more of them behind a mixing of its two inputs."""

from __future__ import annotations

import torch
from torch import nn

from server.model.attention import Attention, RopeSet
from server.model.batch import Batch
from server.model.config import SLIDING, ModelConfig
from server.model.layers import HeadCollapse, HyperConnection, Linear, RMSNorm
from server.model.moe import MoE
from server.model.pools import Pools


class Block(nn.Module):
    """Attention, then experts, each between an mHC collapse and expansion. Keys ``layers.<id>.*``."""

    def __init__(
        self, config: ModelConfig, layer_id: int, ratio: int, row_tile: int, dtype: torch.dtype, swa: str = "swa"
    ) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer_id, ratio, row_tile, dtype, swa)
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


class NextN(Block):
    """The EAGLE-style draft layer, keys ``mtp.0.*``: a window-only block with its own head collapse and norm.

    It has its own window component, ``draft_swa``, because its rows are its own state; its layer id follows the
    backbone's.
    """

    def __init__(self, config: ModelConfig, row_tile: int, dtype: torch.dtype) -> None:
        super().__init__(config, config.num_hidden_layers, SLIDING, row_tile, dtype, swa="draft_swa")
        d = config.hidden_size
        self.enorm = RMSNorm(d, config.rms_norm_eps)
        self.hnorm = RMSNorm(d, config.rms_norm_eps)
        self.e_proj = Linear(d, d, row_tile, dtype)
        self.h_proj = Linear(d, d, row_tile, dtype)
        self.hc_head = HeadCollapse(config.hc_mult, d, config.hc_eps, config.rms_norm_eps, row_tile)
        self.norm = RMSNorm(d, config.rms_norm_eps)

    def mix(self, embedded: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """``e_proj(norm(embedding of t + 1))`` on every stream plus ``h_proj(norm(streams of t))``, normed per stream.

        ``embedded`` ``[rows, D]``, ``streams`` ``[rows, N, D]`` -> ``[rows, N, D]``.
        """
        token: torch.Tensor = self.e_proj(self.enorm(embedded))
        hidden: torch.Tensor = self.h_proj(self.hnorm(streams).flatten(0, 1))
        return token.unsqueeze(1) + hidden.view_as(streams)

    def write_window(self, mixed: torch.Tensor, batch: Batch, pools: Pools, rope: RopeSet) -> None:
        """Only the window rows of ``mixed`` ``[rows, N, D]``: no attention, no experts."""
        x, _, _ = self.hc_attn.collapse(mixed)
        self.attn.write_window(self.attn_norm(x), batch, pools, rope)


def _hyper_connection(config: ModelConfig, row_tile: int) -> HyperConnection:
    return HyperConnection(
        config.hc_mult, config.hidden_size, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps, row_tile
    )
