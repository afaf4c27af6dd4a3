"""How the weights of a table are stored, and how they are cut into rows that are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from server.model.blocks import WEIGHT_BLOCK
from server.model.official_tensors import TensorSpec

CHUNK_VALUES = 1 << 22
"""Values that are computed at a time: 16 MiB in fp32."""
_FORMATS = {"F8_E4M3": "fp8", "I8": "fp4"}
"""How a weight with a scale is quantized, by the dtype that it is stored as."""


def formats_of(table: Mapping[str, TensorSpec]) -> dict[str, str]:
    """``fp8`` or ``fp4`` for each quantized weight of ``table``."""
    return {
        key: _FORMATS[spec.dtype] for key, spec in table.items() if key.endswith(".weight") and spec.dtype in _FORMATS
    }


def row_chunks(n_rows: int, width: int) -> Iterator[range]:
    """Runs of rows that are computed together: whole blocks of fp8, so that no scale is shared by two of them."""
    step = max(1, CHUNK_VALUES // (width * WEIGHT_BLOCK)) * WEIGHT_BLOCK
    for start in range(0, n_rows, step):
        yield range(start, min(start + step, n_rows))


def scale_of(weight: str) -> str:
    """The key of a quantized weight's scale."""
    return weight.removesuffix("weight") + "scale"
