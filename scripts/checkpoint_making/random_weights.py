"""Random weights, made row by row as they are stored: codes and scales first, and plain values from them.

A value is a function of the seed, its key and its shape, so a bf16 or fp32 checkpoint holds exactly what the official
one with the same seed stands for. Values have sizes that keep activations near one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from server.model.blocks import FP4_BLOCK, WEIGHT_BLOCK
from server.model.official_tensors import TensorSpec
from server.model.quantization import (
    dequantize_fp4,
    dequantize_fp8,
    fp4_codes,
)

from .formats import formats_of

_FP8_SIZE, _FP4_SIZE = 64.0, 2.0
"""About the standard deviation of codes, in their own unit: the largest of many fit below 448, and below 6."""
_SCALE_STEPS = torch.tensor([-1, 0, 0, 1], dtype=torch.int16)
"""Exponents of neighbouring blocks differ by this, so that a scale in the wrong place shows."""
_N_DRAWN = 1 << 16


class RandomWeights:
    """``table`` is what they are first stored as; ``n_experts`` bounds the entries of ``tid2eid``.

    A call's rows must be those of :func:`.formats.row_chunks`: each run of rows has its own random numbers.
    """

    def __init__(self, table: Mapping[str, TensorSpec], n_experts: int, seed: int) -> None:
        self._table, self._formats = table, formats_of(table)
        self._n_experts, self._seed = n_experts, seed

    def plain(self, key: str, rows: range, width: int) -> torch.Tensor:
        """fp32 ``[rows, width]`` of a weight: exactly what the stored one stands for."""
        if form := self._formats.get(key):
            codes, scales = self.quantized(key, rows, width, form)
            return dequantize_fp8(codes, scales) if form == "fp8" else dequantize_fp4(codes, scales)
        drawn = _take(_normal(), self._draw(key, rows, len(rows) * width)).view(len(rows), width)
        if "norm" in key:
            values = 1 + 0.1 * drawn
        elif width > 1 and not key.endswith("ape"):
            values = drawn / math.sqrt(width)
        else:
            values = 0.1 * drawn
        return values.bfloat16().float() if self._table[key].dtype == "BF16" else values

    def quantized(self, key: str, rows: range, width: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and E8M0 scales of rows of a linear map with ``width`` inputs, as they are stored."""
        size = _FP8_SIZE if form == "fp8" else _FP4_SIZE
        exponent = round(math.log2(width**-0.5 / size))
        spread = width**-0.5 / 2.0**exponent
        if form == "fp8":
            drawn = self._draw(key, rows, len(rows) * width)
            codes = _take(_fp8_table(spread), drawn).view(torch.float8_e4m3fn).view(len(rows), width)
            blocks = -(-len(rows) // WEIGHT_BLOCK), -(-width // WEIGHT_BLOCK)
        else:
            drawn = self._draw(key, rows, len(rows) * width // 2)
            codes = _take(_fp4_table(spread), drawn).view(torch.int8).view(len(rows), width // 2)
            blocks = len(rows), -(-width // FP4_BLOCK)
        steps = self._draw(key, rows, math.prod(blocks), purpose=1) % len(_SCALE_STEPS)
        exponents = (127 + exponent + _take(_SCALE_STEPS, steps)).to(torch.uint8)
        return codes, exponents.view(torch.float8_e8m0fnu).view(blocks)

    def integers(self, key: str, rows: range, width: int) -> torch.Tensor:
        """int64 ``[rows, width]`` of ``tid2eid``: different experts in each row."""
        drawn = self._generator(key, rows).random((len(rows), self._n_experts), dtype=np.float32)
        return torch.from_numpy(drawn.argsort(axis=1)[:, :width].astype(np.int64))

    def _draw(self, key: str, rows: range, n: int, purpose: int = 0) -> npt.NDArray[np.uint16]:
        words = self._generator(key, rows, purpose).bit_generator.random_raw(-(-n // 4))
        return np.asarray(words, dtype=np.uint64).view(np.uint16)[:n]

    def _generator(self, key: str, rows: range, purpose: int = 0) -> np.random.Generator:
        entropy = [self._seed, xxhash.xxh3_64_intdigest(key.encode()), rows.start, purpose]
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(entropy)))


def _take(table: torch.Tensor, indices: npt.NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(table.numpy()[indices])


@lru_cache
def _normal() -> torch.Tensor:
    """The value of a standard normal distribution for each of 65,536 equal shares, in fp32."""
    shares = (torch.arange(_N_DRAWN, dtype=torch.float64) + 0.5) / _N_DRAWN
    normal: torch.Tensor = torch.special.ndtri(shares).float()
    return normal


@lru_cache
def _fp8_table(spread: float) -> torch.Tensor:
    """An E4M3 code, as a byte, for each share of a normal distribution with this standard deviation."""
    return (_normal() * spread).to(torch.float8_e4m3fn).view(torch.uint8)


@lru_cache
def _fp4_table(spread: float) -> torch.Tensor:
    """A byte of two E2M1 codes for each pair of 256 shares: the lower byte of the pair chooses the lower nibble."""
    shares = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256).float() * spread
    unit = torch.tensor([6.0, -6.0])  # with it the scale is one
    packed = fp4_codes(torch.cat([shares.clamp(-6, 6), unit]), len(shares) + len(unit))[0]
    codes = torch.stack([packed & 15, packed >> 4], dim=1).flatten()[: len(shares)]
    return codes.repeat(len(codes)) | codes.repeat_interleave(len(codes)) << 4
