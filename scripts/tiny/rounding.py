"""The roundings of `--numerics official` in training: forward as the server rounds, backward as if it did not."""

from typing import Any

import torch
from torch import Tensor

from server.model.numerics import OFFICIAL
from server.model.quantization import hadamard


class _KvRows(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, rows: Tensor, rope_dim: int) -> Tensor:
        return OFFICIAL.kv_rows(rows, rope_dim)

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient, None


class _IndexRows(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, rows: Tensor) -> Tensor:
        return OFFICIAL.index_rows(rows)

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return hadamard(gradient)  # the transform is its own transpose


def kv_rows(rows: Tensor, rope_dim: int) -> Tensor:
    """K=V rows `[..., head_dim]`, normed and rotated, as fp8 stores them; the last `rope_dim` channels stay.

    The gradient passes as it is.
    """
    rounded: Tensor = _KvRows.apply(rows, rope_dim)  # type: ignore[no-untyped-call]
    return rounded


def index_rows(rows: Tensor) -> Tensor:
    """Queries or keys of the indexer `[..., index_head_dim]`, rotated: Hadamard transform, then fp4.

    The gradient is that of the transform alone.
    """
    rounded: Tensor = _IndexRows.apply(rows)  # type: ignore[no-untyped-call]
    return rounded
