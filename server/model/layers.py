"""The small parts every layer is made of: row-tiled linear maps, RMSNorm, and the hyper-connections between streams
(mHC).
"""

from __future__ import annotations

import torch
from torch import nn

ROW_TILE = 16
"""Rows of one GEMM in deterministic mode: a row's result then depends on nothing else in the batch."""


def matmul_rows(x: torch.Tensor, weight: torch.Tensor, row_tile: int) -> torch.Tensor:
    """``x [rows, in] @ weight [out, in]^T``. With ``row_tile`` every GEMM has exactly that many rows, the last one
    zero-padded.

    Different row counts make BLAS choose different kernels, which round differently; a fixed count does not.
    """
    rows = x.shape[0]
    if not row_tile or rows == row_tile:
        return nn.functional.linear(x, weight)
    padded = x if rows % row_tile == 0 else nn.functional.pad(x, (0, 0, 0, -rows % row_tile))
    out = x.new_empty(padded.shape[0], weight.shape[0])
    transposed = weight.t()
    for start in range(0, padded.shape[0], row_tile):
        torch.mm(padded[start : start + row_tile], transposed, out=out[start : start + row_tile])
    return out[:rows]


class Linear(nn.Module):
    """A bias-free linear map ``[rows, in] -> [rows, out]``, key ``<name>.weight``."""

    def __init__(self, n_in: int, n_out: int, row_tile: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=dtype), requires_grad=False)
        self.row_tile = row_tile

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matmul_rows(x, self.weight, self.row_tile)


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last axis, computed in fp32 and cast back; key ``<name>.weight``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * unit_rms(x.float(), self.eps)).to(x.dtype)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class HyperConnection(nn.Module):
    """One mHC site (attention or ffn): mixes N streams into a sublayer's input and its output back into the streams.

    Keys ``hc_<site>_fn`` ``[(2 + N) N, N D]``, ``_base`` ``[(2 + N) N]``, ``_scale`` ``[3]``, held by the block that
    owns it.
    """

    def __init__(
        self, n_streams: int, hidden: int, iterations: int, hc_eps: float, norm_eps: float, row_tile: int
    ) -> None:
        super().__init__()
        mix = (2 + n_streams) * n_streams
        self.fn = nn.Parameter(torch.empty(mix, n_streams * hidden, dtype=torch.float32), requires_grad=False)
        self.base = nn.Parameter(torch.empty(mix, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32), requires_grad=False)
        self.n_streams, self.iterations = n_streams, iterations
        self.hc_eps, self.norm_eps, self.row_tile = hc_eps, norm_eps, row_tile

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[rows, N, D]`` -> the sublayer's input ``[rows, D]``, the output weights ``[rows, N]`` and the mixing
        matrix ``[rows, N, N]``.
        """
        n = self.n_streams
        flat = streams.flatten(1).float()
        # normalising after the product: the same value, one pass less over the wide vector
        mix = matmul_rows(flat, self.fn, self.row_tile) * torch.rsqrt(
            flat.square().mean(-1, keepdim=True) + self.norm_eps
        )
        pre = torch.sigmoid(mix[:, :n] * self.scale[0] + self.base[:n]) + self.hc_eps
        post = 2 * torch.sigmoid(mix[:, n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
        comb = self._sinkhorn((mix[:, 2 * n :] * self.scale[2] + self.base[2 * n :]).view(-1, n, n))
        x = (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)
        return x, post, comb

    def expand(self, out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """``new[k] = post[k] out + sum_j comb[j, k] streams[j]`` (the sum runs over the first index)."""
        mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)
        return (post.unsqueeze(-1) * out.float().unsqueeze(1) + mixed).to(streams.dtype)

    def _sinkhorn(self, logits: torch.Tensor) -> torch.Tensor:
        comb = logits.softmax(-1) + self.hc_eps
        comb = comb / (comb.sum(1, keepdim=True) + self.hc_eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(2, keepdim=True) + self.hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + self.hc_eps)
        return comb


class HeadCollapse(nn.Module):
    """The streams' last collapse before the final norm: sigmoid weights only, no mixing. Keys
    ``hc_head_{fn,base,scale}``.
    """

    def __init__(self, n_streams: int, hidden: int, hc_eps: float, norm_eps: float, row_tile: int) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.empty(n_streams, n_streams * hidden, dtype=torch.float32), requires_grad=False)
        self.base = nn.Parameter(torch.empty(n_streams, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)
        self.hc_eps, self.norm_eps, self.row_tile = hc_eps, norm_eps, row_tile

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """``[rows, N, D]`` -> ``[rows, D]``."""
        flat = streams.flatten(1).float()
        mix = matmul_rows(flat, self.fn, self.row_tile) * torch.rsqrt(
            flat.square().mean(-1, keepdim=True) + self.norm_eps
        )
        weights = torch.sigmoid(mix * self.scale + self.base) + self.hc_eps
        return (weights.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)
