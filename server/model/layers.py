"""The small parts every layer is made of: row-tiled linear maps, RMSNorm, and the hyper-connections between streams."""

from __future__ import annotations

import torch
from torch import nn

from server.model.batch_invariant import sigmoid, unit_rms
from server.model.numerics import NumericsLayer
from server.model.stored import StoredWeight

ROW_TILE = 16
"""Rows of one GEMM in deterministic mode: a row's result then depends on nothing else in the batch."""


def matmul_rows(x: torch.Tensor, weight: torch.Tensor, row_tile: int) -> torch.Tensor:
    """``x [rows, in] @ weight [out, in]^T``. With ``row_tile`` every GEMM has that many rows, the last one zero-padded.

    Different row counts make BLAS choose different kernels, which round differently; a fixed count does not.
    """
    rows = x.shape[0]
    if not row_tile or rows == row_tile:
        return nn.functional.linear(x, weight)
    padded = pad_rows(x, row_tile)
    out = x.new_empty(padded.shape[0], weight.shape[0])
    transposed = weight.t()
    for start in range(0, padded.shape[0], row_tile):
        torch.mm(padded[start : start + row_tile], transposed, out=out[start : start + row_tile])
    return out[:rows]


def grouped_matmul_rows(x: torch.Tensor, weight: torch.Tensor, row_tile: int) -> torch.Tensor:
    """Block-diagonal map: ``x [rows, groups, in]``, ``weight [groups, out, in]`` -> ``[rows, groups * out]``."""
    step = row_tile or x.shape[0]
    maps = weight.transpose(1, 2)
    tiles = [torch.bmm(x[i : i + step].transpose(0, 1), maps) for i in range(0, x.shape[0], step)]
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
    return out.transpose(0, 1).flatten(1)


def pad_rows(x: torch.Tensor, row_tile: int) -> torch.Tensor:
    """``x`` with zero rows appended up to a whole number of tiles; unchanged without a tile."""
    missing = -x.shape[0] % row_tile if row_tile else 0
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


class Linear(NumericsLayer):
    """A bias-free linear map ``[rows, in] -> [rows, out]``, key ``<name>.weight``."""

    quantized = ""
    """How the checkpoint stores the weight: ``fp8``, ``fp4``, or as it is."""

    def __init__(self, n_in: int, n_out: int, row_tile: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=dtype), requires_grad=False)
        self.row_tile = row_tile
        self.stored: StoredWeight | None = None  # one that stays in its file: then ``weight`` is empty

    def matrix(self) -> torch.Tensor:
        """The numbers ``[out, in]`` of the weight."""
        return self.weight if self.stored is None else self.stored.numbers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matmul_rows(self.numerics.linear_input(x, self.quantized), self.matrix(), self.row_tile)


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last axis, computed in fp32 and cast back; key ``<name>.weight``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (unit_rms(x.float(), self.eps) * self.weight).to(x.dtype)


class HyperConnection(nn.Module):
    """One mHC site (attention or ffn): mixes N streams into a sublayer's input and its output back into the streams.

    Keys ``hc_<site>_fn`` ``[(2 + N) N, N D]``, ``_base`` ``[(2 + N) N]``, ``_scale`` ``[3]``. All arithmetic is fp32.
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
        self._scales: torch.Tensor | None = None
        self._eps = torch.empty(())

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Streams ``[rows, N, D]`` -> sublayer input ``[rows, D]``, output weights ``[rows, N]``, mixing ``[rows, N,
        N]``.
        """
        n = self.n_streams
        wide = streams.float()
        if self._scales is None:  # one scale for each of pre, post and comb, spread over their channels
            self._scales = torch.cat([self.scale[i].expand(width) for i, width in enumerate((n, n, n * n))])
            self._eps = torch.tensor(self.hc_eps)  # adding a tensor costs half of adding a Python number
        mix = matmul_rows(unit_rms(wide.flatten(1), self.norm_eps), self.fn, self.row_tile)
        mix = torch.addcmul(self.base, mix, self._scales)
        gates = sigmoid(mix[:, : 2 * n])
        pre, post = gates[:, :n] + self._eps, gates[:, n:] * 2
        comb = self._sinkhorn(mix[:, 2 * n :].unflatten(1, (n, n)))
        x = torch.bmm(pre.unsqueeze(1), wide).squeeze(1).to(streams.dtype)
        return x, post, comb

    def expand(self, out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """``new[k] = post[k] out + sum_j comb[j, k] streams[j]`` (the sum runs over the first index)."""
        written = post.unsqueeze(-1) * out.float().unsqueeze(1)
        return torch.baddbmm(written, comb.transpose(1, 2), streams.float()).to(streams.dtype)

    def _sinkhorn(self, logits: torch.Tensor) -> torch.Tensor:
        comb = logits.softmax(-1).add_(self._eps)
        comb.div_(comb.sum(1, keepdim=True).add_(self._eps))
        for _ in range(self.iterations - 1):
            comb.div_(comb.sum(2, keepdim=True).add_(self._eps))
            comb.div_(comb.sum(1, keepdim=True).add_(self._eps))
        return comb


class HeadCollapse(nn.Module):
    """The streams' last collapse before the final norm: sigmoid weights only. Keys ``hc_head_{fn,base,scale}``."""

    def __init__(self, n_streams: int, hidden: int, hc_eps: float, norm_eps: float, row_tile: int) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.empty(n_streams, n_streams * hidden, dtype=torch.float32), requires_grad=False)
        self.base = nn.Parameter(torch.empty(n_streams, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)
        self.hc_eps, self.norm_eps, self.row_tile = hc_eps, norm_eps, row_tile

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """``[rows, N, D]`` -> ``[rows, D]``."""
        wide = streams.float()
        mix = matmul_rows(unit_rms(wide.flatten(1), self.norm_eps), self.fn, self.row_tile)
        weights = sigmoid(mix * self.scale + self.base) + self.hc_eps
        return torch.bmm(weights.unsqueeze(1), wide).squeeze(1).to(streams.dtype)
