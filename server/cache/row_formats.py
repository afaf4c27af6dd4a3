"""How one layer's row of a component is stored: as plain elements, or quantized, with its scales inside the row.

Only names, sizes and offsets are here. What turns values into these bytes is in :mod:`server.model.row_codecs`. A
component's ``dtype`` is the name of its format, and ``width`` counts the elements of one layer's row: values of a plain
format, bytes of a quantized one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

FP8_KV, MXFP4_INDEX, FP8_INDEX = "fp8_kv", "mxfp4_index", "fp8_index"
QUANTIZED_ROWS = (FP8_KV, MXFP4_INDEX, FP8_INDEX)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "uint8": 1, **dict.fromkeys(QUANTIZED_ROWS, 1)}
"""Bytes of one element, by the format names that components may have."""

AUTO, MODEL, FP8, MXFP4 = "auto", "model", "fp8", "mxfp4"
KV_DTYPES = (MODEL, FP8)
"""Choices of ``--kv-dtype``: rows of windows and compressed entries as the model computes them, or as fp8."""
INDEX_DTYPES = (AUTO, MODEL, MXFP4, FP8)
"""Choices of ``--index-dtype``: keys of the indexer."""

_ROW_ALIGNMENT = 8
_BF16_NBYTES, _FP32_NBYTES = 2, 4


def kv_block(width: int) -> int:
    """Channels of a KV row (without the rotated ones) that share a scale: 64, or what divides a smaller ``width``."""
    return gcd(width, 64)


def index_block(width: int) -> int:
    """Channels of an index key that share a scale: 32, or what divides a smaller ``width``."""
    return gcd(width, 32)


@dataclass(frozen=True)
class Fp8KvRow:
    """``fp8_kv``: ``[nope x e4m3 | rope x bf16 | one E8M0 byte for each block of nope channels | zeros]``.

    ``nope`` and ``rope`` count channels. The row is filled up to a multiple of 8 bytes: 584 for 448 and 64 channels.
    """

    nope: int
    rope: int

    @property
    def block(self) -> int:
        return kv_block(self.nope)

    @property
    def rope_offset(self) -> int:
        return self.nope

    @property
    def scale_offset(self) -> int:
        return self.nope + self.rope * _BF16_NBYTES

    @property
    def n_scales(self) -> int:
        return self.nope // self.block

    @property
    def nbytes(self) -> int:
        used = self.scale_offset + self.n_scales
        return (used + _ROW_ALIGNMENT - 1) // _ROW_ALIGNMENT * _ROW_ALIGNMENT


@dataclass(frozen=True)
class Mxfp4IndexRow:
    """``mxfp4_index``: ``[width / 2 bytes of e2m1 pairs, the earlier channel in the low nibble | one E8M0 byte for each
    block]``, without a gap.

    ``width`` counts channels, an even number: 68 bytes for 128 channels.
    """

    width: int

    @property
    def block(self) -> int:
        return index_block(self.width)

    @property
    def scale_offset(self) -> int:
        return self.width // 2

    @property
    def n_scales(self) -> int:
        return self.width // self.block

    @property
    def nbytes(self) -> int:
        return self.scale_offset + self.n_scales


@dataclass(frozen=True)
class Fp8IndexRow:
    """``fp8_index``: ``[width x e4m3 | one fp32 scale, little endian]``: 132 bytes for 128 channels.

    The scale is the largest magnitude (at least 1e-4) divided by 448, which need not be a power of two.
    """

    width: int

    @property
    def scale_offset(self) -> int:
        return self.width

    @property
    def nbytes(self) -> int:
        return self.scale_offset + _FP32_NBYTES


def chosen_index_dtype(kv_dtype: str, index_dtype: str) -> str:
    """What ``--index-dtype`` means beside ``--kv-dtype``: ``auto`` is ``mxfp4`` with fp8 rows, otherwise ``model``."""
    if index_dtype != AUTO:
        return index_dtype
    return MXFP4 if kv_dtype == FP8 else MODEL
