"""Codes, scales and simulated values: those of ``server/model/quantization.py``, bit for bit, on every machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from server.kernels.build import Isa
from server.model import quantization
from tests.support.kernel_functions import EVERY_ISA, Kernels, bits

SHAPES = [(1, 128), (128, 128), (200, 128), (448, 64), (100, 4), (33, 1), (62, 2), (3000, 128)]
"""Channels and those of a block: one block and many, a short last one, widths that are multiples of nothing."""

every_isa = pytest.mark.parametrize("isa", EVERY_ISA)


def rows(n: int) -> Iterator[torch.Tensor]:
    """Any bits (NaN, infinities), any numbers, ties, floors, zeros of both signs, subnormal and huge ones."""
    generator = torch.Generator().manual_seed(n)

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (n,), generator=generator)

    any_bits = whole(-(2**31), 2**31).to(torch.int32).view(torch.float32)
    smooth = torch.randn(n, generator=generator)
    yield any_bits
    yield torch.where(any_bits.isfinite(), any_bits, torch.ones(()))
    yield smooth
    yield smooth * 1e-6
    yield smooth * 1e-40
    yield smooth * torch.exp2(whole(-20, 20).float())
    yield whole(-512, 513) / 64
    yield whole(-32, 33) / 4
    yield 448 * torch.exp2(whole(-126, 118).float())
    yield torch.nextafter(448 * torch.exp2(whole(-126, 118).float()), torch.tensor(torch.inf))
    yield torch.zeros(n)
    yield -torch.zeros(n)
    yield torch.full((n,), 3.4e38)
    yield torch.where(whole(0, 50) == 0, torch.nan, smooth)
    yield torch.where(whole(0, 50) == 0, -torch.inf, smooth)


class Codec:
    """The kernels' functions of one format: ``fp8`` or ``fp4``."""

    def __init__(self, name: str, isa: Isa) -> None:
        self.name, self.kernels, self.per_byte = name, Kernels(isa), 2 if name == "fp4" else 1

    def _call(self, function: str, *arguments: torch.Tensor | int) -> None:
        getattr(self.kernels.functions, f"kernels_{function}_{self.name}")(
            *(self.kernels.argument(each) for each in arguments)
        )

    def encode(self, x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty(len(x) // self.per_byte, dtype=torch.uint8)
        scales = torch.empty(-(-len(x) // block), dtype=torch.uint8)
        self._call("encode", x, len(x), block, codes, scales)
        return codes, scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
        x = torch.empty(len(codes) * self.per_byte)
        self._call("decode", codes, scales, len(x), block, x)
        return x

    def simulate(self, x: torch.Tensor, block: int) -> torch.Tensor:
        out = torch.empty_like(x)
        self._call("simulate", x, len(x), block, out)
        return out


@every_isa
@pytest.mark.parametrize(("n", "block"), SHAPES)
def test_fp8_is_that_of_the_python_functions(n: int, block: int, isa: Isa) -> None:
    codec = Codec("fp8", isa)
    for x in rows(n):
        expected, scales = quantization.fp8_codes(x, block)
        values = quantization.fp8_values(expected, scales, block)
        codes, found = codec.encode(x, block)
        assert torch.equal(found, scales)
        is_nan = expected.float().isnan()  # which of the codes for it is not said
        assert torch.equal(codes.view(torch.float8_e4m3fn).float().isnan(), is_nan)
        assert torch.equal(codes[~is_nan], expected.view(torch.uint8)[~is_nan])
        assert torch.equal(bits(codec.decode(codes, scales, block)), bits(values))
        assert torch.equal(bits(codec.simulate(x, block)), bits(values))


@every_isa
@pytest.mark.parametrize(("n", "block"), [shape for shape in SHAPES if not any(size % 2 for size in shape)])
def test_fp4_is_that_of_the_python_functions(n: int, block: int, isa: Isa) -> None:
    codec = Codec("fp4", isa)
    for x in rows(n):
        expected, scales = quantization.fp4_codes(x, block)
        values = quantization.fp4_values(expected, scales, block)
        codes, found = codec.encode(x, block)
        assert torch.equal(found, scales)
        is_number = ~values.view(-1, 2).isnan().any(-1)
        assert torch.equal(codes[is_number], expected[is_number])
        assert torch.equal(bits(codec.decode(codes, scales, block)), bits(values))
        assert torch.equal(bits(codec.simulate(x, block)), bits(values))


@every_isa
def test_every_code_with_every_scale(isa: Isa) -> None:
    codes, scales = torch.arange(256).to(torch.uint8).repeat(256), torch.arange(256).to(torch.uint8)
    expected = quantization.fp8_values(codes.view(torch.float8_e4m3fn), scales, 256)
    assert torch.equal(bits(Codec("fp8", isa).decode(codes, scales, 256)), bits(expected))
    expected = quantization.fp4_values(codes, scales, 512)
    assert torch.equal(bits(Codec("fp4", isa).decode(codes, scales, 512)), bits(expected))


@every_isa
@pytest.mark.parametrize("n", [1, 2, 8, 16, 64, 128, 512])
def test_the_hadamard_transform_is_that_of_the_python_function(n: int, isa: Isa) -> None:
    kernels = Kernels(isa)
    for x in rows(n):
        out = x.contiguous().clone()
        kernels.functions.kernels_hadamard(kernels.argument(out), kernels.argument(n))
        assert torch.equal(bits(out), bits(quantization.hadamard(x)))
