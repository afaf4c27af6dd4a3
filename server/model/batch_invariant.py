"""Operations of which every element is the same bits wherever it lies: in which row, of how many, in which thread's
share.

torch computes in vectors, and what is left at the end of a tensor or of a thread's share by scalar code, which may
round otherwise. How much is left depends on the number of elements, so on the batch. That is so for ``sigmoid``,
``silu``, ``softplus``, ``pow``, complex products, ``softmax`` over an inner axis and sums over an outer one. It is not
so for ``+ - * /``, ``sqrt`` and ``max``, which round correctly, nor for ``exp``, ``log1p``, ``cos`` and ``sin``, whose
kernels use vector code to the end, nor for ``softmax`` and sums over the last axis. The model uses only these, and the
functions below, which are made of them.

MKL's matrix products depend on where in memory a row begins and, with several threads, on whether a batch of products
is a single one. ``MKL_CBWR`` (see ``server.model``) ends the former, :func:`bmm` the latter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_SERIAL = (1 << 15) - 1
"""Up to this many elements torch does not divide an operation among threads (below its ``GRAIN_SIZE``)."""

_ONE = torch.tensor(1.0)
"""Adding a tensor costs half of adding a Python number."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))`` of every element."""
    return x.neg().exp_().add_(_ONE).reciprocal_()


def swiglu_(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of every element, ``silu(x) = x / (1 + exp(-x))``. Overwrites both and returns ``up``."""
    return up.mul_(gate).div_(gate.neg_().exp_().add_(_ONE))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))`` of every element; from 20 on that is ``x`` in fp32."""
    return torch.maximum(x, x.clamp(max=20).exp_().log1p_())


def softmax_pool(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``sum_j softmax_j(scores) values[j]`` for every channel: both ``[rows, n, channels]`` -> ``[rows, channels]``."""
    weights = (scores - scores.amax(1, keepdim=True)).exp_()
    return _sum_halves(weights * values) / _sum_halves(weights)


def _sum_halves(x: torch.Tensor) -> torch.Tensor:
    """The sum over axis 1 of ``[rows, n, ...]``: one half is added to the other until one is left."""
    while (n := x.shape[1]) > 1:
        half = n // 2
        added = x[:, :half] + x[:, half : 2 * half]
        x = added if n == 2 * half else torch.cat([added, x[:, 2 * half :]], dim=1)
    return x[:, 0]


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, computed in fp32 and cast back."""
    wide = x.float()
    return (wide * (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype)


def bmm(a: torch.Tensor, b: torch.Tensor, row_tile: int) -> torch.Tensor:
    """One product for each row: ``a [rows, m, k] @ b [rows, k, n]`` -> ``[rows, m, n]``.

    Threads share out a batch of products, but work together on a single one, and then round otherwise. So with several
    of them each call has ``row_tile`` products (0: as many as there are rows).
    """
    rows = a.shape[0]
    if not row_tile or rows == row_tile or torch.get_num_threads() == 1:
        return torch.bmm(a, b)
    if missing := -rows % row_tile:
        a, b = _repeat_last(a, missing), _repeat_last(b, missing)
    products = [torch.bmm(a[i : i + row_tile], b[i : i + row_tile]) for i in range(0, rows, row_tile)]
    return torch.cat(products)[:rows]


def _repeat_last(x: torch.Tensor, times: int) -> torch.Tensor:
    """``x`` ``[rows, m, n]`` with its last row ``times`` more; transposed in memory if ``x`` is, since a product of
    another layout is rounded otherwise.
    """
    if x.stride(1) < x.stride(2):
        return _repeat_last(x.transpose(1, 2), times).transpose(1, 2)
    return torch.cat([x, x[-1:].expand(times, -1, -1)])


def serial_parts(n_rows: int, row_numel: int) -> Iterator[slice]:
    """Cuts ``n_rows`` rows of ``row_numel`` elements each into runs that no two threads share.

    For operations whose rows are alike as long as none is cut between two threads.
    """
    step = max(1, n_rows if torch.get_num_threads() == 1 else _SERIAL // row_numel)
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))
