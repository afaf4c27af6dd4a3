"""Between the values of a row and what a pool stores of them: plain elements, or the bytes of a quantized row.

A pool encodes whatever it is given and decodes whatever it is asked for, rows of the same forward included. So what is
read of a row never depends on when it was written. Every operation here is exact or rounds each element by itself:
neither the batch nor the machine changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from server.cache.arena import TORCH_DTYPES
from server.cache.layout import ComponentLayout
from server.cache.row_formats import (
    FP8_INDEX,
    FP8_KV,
    MXFP4_INDEX,
    QUANTIZED_ROWS,
    Fp8IndexRow,
    Fp8KvRow,
    Mxfp4IndexRow,
)
from server.cache.specs import LayoutError
from server.model.config import ModelConfig
from server.model.quantization import fp4_codes, fp4_values, fp8_codes, fp8_values
from server.model.state import fp8_kv_row

_INDEX_FLOOR, _FP8_MAX = 1e-4, 448.0


class RowCodec(Protocol):
    """How the rows of one component are stored."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[..., channels]`` -> elements ``[..., width]`` of the component."""
        ...

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Elements ``[..., width]`` -> values ``[..., channels]``; zero of zeros, NaN of what was never written."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """Elements are the values, in ``dtype``."""

    dtype: torch.dtype

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@dataclass(frozen=True)
class Fp8KvRows:
    """:class:`Fp8KvRow`: the nope channels as fp8, the rope channels as bf16. Decoded values have ``dtype``, in which
    they are exact.
    """

    row: Fp8KvRow
    dtype: torch.dtype

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        row = self.row
        codes, scales = fp8_codes(values[..., : row.nope], row.block)
        rope = values[..., row.nope :].to(torch.bfloat16).contiguous()
        rest = scales.new_zeros(*scales.shape[:-1], row.nbytes - row.scale_offset - row.n_scales)
        return torch.cat([codes.view(torch.uint8), rope.view(torch.uint8), scales, rest], dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        row = self.row
        codes = _bytes(rows, 0, row.nope).view(torch.float8_e4m3fn)
        rope = _bytes(rows, row.rope_offset, row.scale_offset).view(torch.bfloat16)
        scales = _bytes(rows, row.scale_offset, row.scale_offset + row.n_scales)
        return torch.cat([fp8_values(codes, scales, row.block).to(self.dtype), rope.to(self.dtype)], dim=-1)


@dataclass(frozen=True)
class Mxfp4IndexRows:
    """:class:`Mxfp4IndexRow`: every channel as fp4. Decoded values have ``dtype``, in which they are exact."""

    row: Mxfp4IndexRow
    dtype: torch.dtype

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(fp4_codes(values, self.row.block), dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        row = self.row
        packed, scales = _bytes(rows, 0, row.scale_offset), _bytes(rows, row.scale_offset, row.nbytes)
        return fp4_values(packed, scales, row.block).to(self.dtype)


@dataclass(frozen=True)
class Fp8IndexRows:
    """:class:`Fp8IndexRow`: every channel as fp8, with one fp32 scale that is no power of two. Decoded values are
    rounded to ``dtype``.
    """

    row: Fp8IndexRow
    dtype: torch.dtype

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=_INDEX_FLOOR) / _FP8_MAX
        codes = (wide / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        row = self.row
        codes = _bytes(rows, 0, row.scale_offset).view(torch.float8_e4m3fn)
        scale = _bytes(rows, row.scale_offset, row.nbytes).view(torch.float32)
        return (codes.float() * scale).to(self.dtype)


def _bytes(rows: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of every row, copied to where elements of any size are aligned."""
    return rows[..., start:stop].clone(memory_format=torch.contiguous_format)


def row_codec(component: ComponentLayout, config: ModelConfig, dtype: torch.dtype) -> RowCodec:
    """The codec for rows of ``component``, of a model with ``config`` that computes in ``dtype``.

    Raises :class:`LayoutError` if its rows have another size than the model's.
    """
    if component.dtype not in QUANTIZED_ROWS:
        return PlainRows(TORCH_DTYPES[component.dtype])
    codecs: dict[str, Fp8KvRows | Mxfp4IndexRows | Fp8IndexRows] = {
        FP8_KV: Fp8KvRows(fp8_kv_row(config), dtype),
        MXFP4_INDEX: Mxfp4IndexRows(Mxfp4IndexRow(config.index_head_dim), dtype),
        FP8_INDEX: Fp8IndexRows(Fp8IndexRow(config.index_head_dim), dtype),
    }
    codec = codecs[component.dtype]
    if component.width != codec.row.nbytes:
        raise LayoutError(
            f"{component.name} has {component.dtype} rows of {component.width} bytes, the model's have "
            f"{codec.row.nbytes}",
            component.name,
        )
    return codec
