"""The weights of a checkpoint that exists, read row by row: to be quantized, or to be made plain."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from server.model.blocks import WEIGHT_BLOCK
from server.model.config import CheckpointError
from server.model.official_tensors import TensorSpec
from server.model.quantization import dequantize_fp4, dequantize_fp8, quantize_fp4, quantize_fp8
from server.model.tensor_files import TensorHeader, tensor_headers


class StoredWeights:
    """The tensors of ``folder``. ``expected`` is what its config asks for: shapes must be those, dtypes only where a
    weight is quantized.

    Raises :class:`CheckpointError` for a tensor that is missing, unknown or of another shape.
    """

    def __init__(self, folder: Path, expected: dict[str, TensorSpec]) -> None:
        self._headers = {header.key: header for header in tensor_headers(folder)}
        for key, spec in expected.items():
            header = self._headers.get(key)
            if header is None:
                raise CheckpointError(f"{folder}: {key} is missing")
            if header.shape != spec.shape:
                raise CheckpointError(
                    f"{header.file}: {key} has shape {list(header.shape)}, config.json asks for {list(spec.shape)}"
                )
        if unknown := sorted(self._headers.keys() - expected.keys()):
            raise CheckpointError(f"{folder}: {unknown[0]} is not in a checkpoint of this config.json")

    def plain(self, key: str, rows: range, width: int) -> torch.Tensor:
        """fp32 ``[rows, width]`` of a weight, whatever it is stored as."""
        header = self._headers[key]
        if header.dtype == "F8_E4M3":
            scales = range(rows.start // WEIGHT_BLOCK, -(-rows.stop // WEIGHT_BLOCK))
            return dequantize_fp8(_rows(header, rows), _rows(self._scale_of(key), scales))
        if header.dtype == "I8":
            return dequantize_fp4(_rows(header, rows), _rows(self._scale_of(key), rows))
        return _rows(header, rows).float().view(len(rows), width)

    def quantized(self, key: str, rows: range, width: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and E8M0 scales of rows of a linear map, as they are to be stored."""
        values = self.plain(key, rows, width)
        return quantize_fp8(values) if form == "fp8" else quantize_fp4(values)

    def integers(self, key: str, rows: range, width: int) -> torch.Tensor:
        """int64 ``[rows, width]`` of ``tid2eid``."""
        return _rows(self._headers[key], rows).long()

    def _scale_of(self, key: str) -> TensorHeader:
        return self._headers[key.removesuffix("weight") + "scale"]


def _rows(header: TensorHeader, rows: range) -> torch.Tensor:
    with safe_open(header.file, framework="pt") as tensors:
        part: torch.Tensor = tensors.get_slice(header.key)[rows.start : rows.stop]
        return part
