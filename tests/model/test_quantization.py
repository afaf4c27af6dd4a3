"""The number formats, against values worked out by hand and against a slow search over all codes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from server.model import quantization as q

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FINITE_E4M3 = E4M3[E4M3.isfinite()]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def exponent_by_hand(largest: float, top: float) -> int:
    """The smallest e with ``largest <= top 2^e``, by trying."""
    return next(e for e in range(-160, 160) if largest <= top * 2.0**e)


@pytest.mark.parametrize(("top", "codes"), [(448.0, q.fp8_codes), (6.0, q.fp4_codes)])
def test_the_scale_is_the_smallest_power_of_two_that_fits(top: float, codes: Any) -> None:
    edges = [top * 2.0**e for e in (-10, -1, 0, 1, 20)]
    values = torch.tensor([v for e in edges for v in (e, e * (1 + 2**-23), e * (1 - 2**-24), e / 3, e / 1.7)])
    _, exponents = codes(torch.stack([values, -values / 2], dim=1), 2)
    assert exponents[:, 0].tolist() == [exponent_by_hand(v, top) + 127 for v in values.tolist()]


def test_fp8_rounds_to_the_nearest_value_and_ties_to_even() -> None:
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 0.001, 0.0, -0.0, 100.0]])  # scale 1: 16, 18, 20 are codes, 96 and 104
    codes, exponents = q.fp8_codes(x, 8)
    assert exponents.tolist() == [[127]]
    assert codes.float().tolist() == [[448, 16, 20, -16, 2**-9, 0, 0, 96]]
    assert q.fp8_values(codes, exponents, 8)[0, 6].signbit()


def test_fp8_picks_the_nearest_of_all_codes() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 64, generator=generator) * torch.logspace(-6, 6, 50)[:, None]
    values = q.fp8_simulated(x, 64)
    for row, simulated in zip(x, values, strict=True):
        scale = 2.0 ** exponent_by_hand(max(float(row.abs().max()), 1e-4), 448)
        distances = (FINITE_E4M3[None] * scale - row[:, None]).abs()
        assert torch.equal((simulated - row).abs(), distances.amin(1))


def test_fp4_picks_the_nearest_of_all_codes_and_ties_go_to_even() -> None:
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]])
    assert q.fp4_simulated(ties, 8).tolist() == [[0, 1, 1, 2, 2, 4, 4, 6]]
    assert q.fp4_simulated(-ties, 8).tolist() == [[-0.0, -1, -1, -2, -2, -4, -4, -6]]
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(2)) * torch.logspace(-30, 30, 50)[:, None]
    for row, simulated in zip(x, q.fp4_simulated(x, 32), strict=True):
        scale = 2.0 ** exponent_by_hand(float(row.abs().max()), 6)
        assert torch.equal((simulated - row).abs(), (E2M1[None] * scale - row[:, None]).abs().amin(1))


def test_the_lower_nibble_comes_first() -> None:
    packed, exponents = q.fp4_codes(torch.tensor([[1.0, -6.0, 0.5, 0.0]]), 4)
    assert packed.tolist() == [[0xF2, 0x01]]
    assert q.fp4_values(packed, exponents, 4).tolist() == [[1, -6, 0.5, 0]]


def test_small_blocks_count_as_the_floor() -> None:
    _, exponents = q.fp8_codes(torch.zeros(1, 4), 4)
    assert exponents.item() - 127 == exponent_by_hand(1e-4, 448)
    _, exponents = q.fp4_codes(torch.zeros(1, 4), 4)
    assert exponents.item() - 127 == -126


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan(bad: float) -> None:
    x = torch.ones(2, 128)
    x[0, 70] = bad
    for simulated in (q.fp8_simulated(x, 64), q.fp4_simulated(x, 64)):
        assert simulated[0, 64:].isnan().all()
        assert simulated[0, :64].eq(1).all()
        assert simulated[1].eq(1).all()


@pytest.mark.parametrize(("width", "block"), [(128, 64), (100, 64), (20, 20), (6, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_values_are_exact_in_the_dtype_of_the_model(width: int, block: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    for codes, values in ((q.fp8_codes, q.fp8_values), (q.fp4_codes, q.fp4_values)):
        stored = values(*codes(x, block), block)
        assert stored.shape == x.shape
        assert torch.equal(stored.to(dtype).float(), stored)
        assert torch.equal(values(*codes(stored, block), block), stored)


def test_hadamard_is_sylvesters_matrix() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(q.hadamard(x), x @ matrix / 32**0.5)
    torch.testing.assert_close(q.hadamard(q.hadamard(x)), x)
    with pytest.raises(ValueError, match="power of two, not 12"):
        q.hadamard(torch.zeros(12))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 260), (1, 2), (127, 129), (5, 300)])
def test_fp8_weights_have_a_scale_for_each_block(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(5))
    weight[:128] *= 1000
    codes, scale = q.quantize_fp8(weight)
    assert scale.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    expected = torch.empty(shape)
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        exponent = exponent_by_hand(float(weight[block].abs().max()), 448)
        assert scale.view(torch.uint8)[i, j] == exponent + 127
        expected[block] = codes[block].float() * 2.0**exponent
    assert torch.equal(q.dequantize_fp8(codes, scale), expected)
    assert float((expected - weight).abs().max()) <= float(weight.abs().max()) / 16


@pytest.mark.parametrize("shape", [(128, 128), (3, 64), (7, 34), (1, 2)])
def test_fp4_weights_have_a_scale_for_every_32_columns(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(6))
    packed, scale = q.quantize_fp4(weight)
    assert packed.dtype == torch.int8
    assert packed.shape == (shape[0], shape[1] // 2)
    assert scale.shape == (shape[0], math.ceil(shape[1] / 32))
    values = q.dequantize_fp4(packed, scale)
    for row, column in itertools.product(range(shape[0]), range(shape[1])):
        byte = int(packed.view(torch.uint8)[row, column // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        assert values[row, column] == E2M1[nibble] * 2.0 ** (int(scale.view(torch.uint8)[row, column // 32]) - 127)
