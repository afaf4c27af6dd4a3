"""Linear maps: near torch, and the same bits in every batch, with any number of threads, on every kind of machine."""

from __future__ import annotations

import pytest
import torch

from server.kernels.build import Isa
from tests.support.kernel_functions import EVERY_ISA, ROWS, Kernels, assert_rows_do_not_matter, bits

SHAPES = [(1, 1), (7, 5), (16, 127), (24, 1027), (48, 256), (64, 128), (65, 129), (100, 385), (257, 511), (33, 2048)]
"""(out, in): one panel and several, panels that are not full, one part and several, an odd rest."""
DTYPES = [torch.float32, torch.bfloat16]


def case(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight ``[out, in]`` and rows ``[ROWS, in]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype), torch.randn(ROWS, shape[1], generator=generator)


def linear(kernels: Kernels, weight: torch.Tensor, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), -1.0)
    kernels.call("kernels_linear", kernels.matrix(weight), x.contiguous(), len(x), out, threads)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_map_is_near_the_exact_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = case(shape, dtype)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    assert ((linear(Kernels(), weight, x) - exact).abs() / scale).max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (700, 600)])
def test_row_does_not_depend_on_the_batch_or_the_threads(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = case(shape, dtype)
    kernels = Kernels()
    assert_rows_do_not_matter(lambda rows, threads: linear(kernels, weight, x[rows], threads))


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_map_is_the_same_bits_on_every_machine(shape: tuple[int, int], dtype: torch.dtype, isa: Isa) -> None:
    weight, x = case(shape, dtype)
    for n in (1, 2, 3, 4, 5, 17):
        assert torch.equal(bits(linear(Kernels(isa), weight, x[:n])), bits(linear(Kernels(), weight, x[:n])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4, 20])
def test_nan_and_infinity_come_through_where_they_belong(n: int, dtype: torch.dtype) -> None:
    weight, x = case((70, 131), dtype)
    clean = linear(Kernels(), weight, x[:n])
    weight[69, 130], weight[3, 0], x[0, 130] = float("nan"), float("inf"), float("inf")
    out = linear(Kernels(), weight, x[:n])
    assert out[:, 69].isnan().all()
    assert not out[:, 3].isfinite().any()
    assert not out[0].isfinite().any()
    untouched = [c for c in range(70) if c not in (3, 69)]
    assert torch.equal(out[1:, untouched], clean[1:, untouched])


def test_a_matrix_takes_no_more_memory_than_whole_sixteens_of_columns() -> None:
    kernels = Kernels()
    assert kernels.functions.kernels_packed_nbytes(65, 3, 0) == 80 * 3 * 4
    assert kernels.functions.kernels_packed_nbytes(65, 3, 1) == 80 * 4 * 2
