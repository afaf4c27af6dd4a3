"""The number formats of quantized weights and state rows: what is stored, and the values that it stands for.

All are blocks of small numbers with one scale, a power of two in one byte (E8M0, ``2^(byte - 127)``, 255 = NaN):

- fp8 (E4M3): 3 bits of fraction, at most 448. Weights in blocks of 128 x 128, activations and rows in runs of channels.
- fp4 (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two in a byte, the lower nibble first. In runs of 32.

Every stored value is exact in fp32 and bf16. What is computed here rounds to the nearest, ties to even; a block that
holds a NaN or an infinity is NaN throughout. Source: the reference's quantization kernels.
"""

from __future__ import annotations

import functools
import math

import torch

from server.model.blocks import FP4_BLOCK, WEIGHT_BLOCK

_FP8_FLOOR, _FP4_FLOOR = 1e-4, 6 * 2.0**-126
"""A block's largest magnitude counts as at least this."""
_NAN_BYTE = 255
_FRACTION_BITS, _BIAS = 23, 127

_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_BYTE_PAIRS = torch.stack(
    [torch.cat([_MAGNITUDES, -_MAGNITUDES])[nibbles] for nibbles in (torch.arange(256) % 16, torch.arange(256) // 16)],
    dim=1,
)
"""The two fp4 values of every byte, ``[256, 2]``."""


# --- scales -----------------------------------------------------------------------------------------------------------


def e8m0_values(scale: torch.Tensor) -> torch.Tensor:
    """``2^(byte - 127)`` in fp32 of E8M0 bytes (``uint8`` or ``float8_e8m0fnu``, any shape); 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def _exponents(largest: torch.Tensor, floor: float, top: float) -> torch.Tensor:
    """The smallest e with ``largest <= top 2^e``, as E8M0 bytes; by the bits of ``largest`` (fp32), so exactly."""
    bits = largest.clamp(min=floor).view(torch.int32)
    fraction, exponent = math.frexp(top)
    top_fraction = int((2 * fraction - 1) * (1 << _FRACTION_BITS))
    above = (bits & ((1 << _FRACTION_BITS) - 1)) > top_fraction
    byte = (bits >> _FRACTION_BITS) - (exponent - 1) + above
    return torch.where(largest.isfinite(), byte, _NAN_BYTE).to(torch.uint8)


def _inverse(exponents: torch.Tensor) -> torch.Tensor:
    """``2^(127 - byte)`` in fp32; of 255 a NaN."""
    power = ((2 * _BIAS - exponents.int()) << _FRACTION_BITS).view(torch.float32)
    return torch.where(exponents == _NAN_BYTE, torch.nan, power)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """``[..., width]`` -> fp32 ``[..., blocks, block]``, the last block filled up with zeros."""
    missing = -x.shape[-1] % block
    wide = x.float()
    if missing:
        wide = torch.nn.functional.pad(wide, (0, missing))
    return wide.reshape(*wide.shape[:-1], wide.shape[-1] // block, block)


# --- rows: runs of channels with a scale each -------------------------------------------------------------------------


def fp8_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``float8_e4m3fn [..., width]`` and E8M0 bytes ``uint8 [..., blocks]`` of ``x [..., width]``."""
    wide = _blocks(x, block)
    exponents = _exponents(wide.abs().amax(-1), _FP8_FLOOR, 448.0)
    scaled = (wide * _inverse(exponents).unsqueeze(-1)).clamp(-448, 448)
    return scaled.to(torch.float8_e4m3fn).flatten(-2)[..., : x.shape[-1]], exponents


def fp8_values(codes: torch.Tensor, exponents: torch.Tensor, block: int) -> torch.Tensor:
    """What :func:`fp8_codes` stored, in fp32."""
    return (_blocks(codes, block) * e8m0_values(exponents).unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]]


def fp4_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed nibbles ``uint8 [..., width / 2]`` and E8M0 bytes ``uint8 [..., ceil(width / block)]`` of ``x [...,
    width]``; ``width`` is even.
    """
    wide = _blocks(x, block)
    exponents = _exponents(wide.abs().amax(-1), _FP4_FLOOR, 6.0)
    scaled = (wide * _inverse(exponents).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    size = scaled.abs()
    code = torch.zeros(size.shape, dtype=torch.uint8, device=x.device)
    for i, tie in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += size > tie if i % 2 == 0 else size >= tie  # a tie goes to the even code
    code |= scaled.signbit().to(torch.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4, exponents


def fp4_values(packed: torch.Tensor, exponents: torch.Tensor, block: int) -> torch.Tensor:
    """What :func:`fp4_codes` stored, in fp32 ``[..., width]``."""
    values = _byte_pairs(packed.device)[packed.view(torch.uint8).int()].flatten(-2)
    return (_blocks(values, block) * e8m0_values(exponents).unsqueeze(-1)).flatten(-2)[..., : values.shape[-1]]


@functools.cache
def _byte_pairs(device: torch.device) -> torch.Tensor:
    return _BYTE_PAIRS.to(device)


def fp8_simulated(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x [..., width]`` as fp8 would store it, in its own dtype."""
    return fp8_values(*fp8_codes(x, block), block).to(x.dtype)


def fp4_simulated(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x [..., width]`` as fp4 would store it, in its own dtype."""
    return fp4_values(*fp4_codes(x, block), block).to(x.dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """``x [..., n]`` times the Hadamard matrix in Sylvester's order, divided by ``sqrt(n)``; computed in fp32, cast
    back. Raises ``ValueError`` if ``n`` is no power of two.
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, not {n} channels")
    wide, apart = x.float(), 1
    while apart < n:
        pairs = wide.reshape(*x.shape[:-1], -1, 2, apart)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        wide = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        apart *= 2
    return (wide * math.sqrt(1 / n)).to(x.dtype)


# --- weights ----------------------------------------------------------------------------------------------------------


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, in]`` -> codes ``float8_e4m3fn [out, in]`` and ``float8_e8m0fnu [ceil(out / 128), ceil(in / 128)]``."""
    n_out, n_in = weight.shape
    columns = _blocks(weight, WEIGHT_BLOCK).abs().amax(-1)  # [out, in blocks]
    largest = _blocks(columns.t(), WEIGHT_BLOCK).amax(-1).t().contiguous()
    exponents = _exponents(largest, _FP8_FLOOR, 448.0)
    scaled = (weight.float() * _spread(_inverse(exponents), n_out, n_in)).clamp_(-448, 448)
    return scaled.to(torch.float8_e4m3fn), exponents.view(torch.float8_e8m0fnu)


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes ``float8_e4m3fn [out, in]`` and E8M0 scales ``[ceil(out / 128), ceil(in / 128)]`` -> fp32 ``[out, in]``."""
    return weight.float().mul_(_spread(e8m0_values(scale), *weight.shape))


def quantize_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, in]`` -> packed ``int8 [out, in / 2]`` and ``float8_e8m0fnu [out, ceil(in / 32)]``; ``in`` is even."""
    packed, exponents = fp4_codes(weight, FP4_BLOCK)
    return packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu)


def dequantize_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed ``int8 [out, in / 2]`` and E8M0 scales ``[out, ceil(in / 32)]`` -> fp32 ``[out, in]``."""
    return fp4_values(packed, scale.view(torch.uint8), FP4_BLOCK)


def _spread(blocks: torch.Tensor, n_out: int, n_in: int) -> torch.Tensor:
    """One value for each block of a weight -> one for each column of each row, ``[out, in]`` (rows share memory where
    they can).
    """
    columns = blocks.repeat_interleave(WEIGHT_BLOCK, dim=1)[:, :n_in]
    return columns.repeat_interleave(WEIGHT_BLOCK, dim=0)[:n_out]
