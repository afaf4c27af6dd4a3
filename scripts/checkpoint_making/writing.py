"""Writes every tensor of a table, a few million values at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from server.model.blocks import WEIGHT_BLOCK
from server.model.official_tensors import TensorSpec

from .files import ShardedFiles
from .formats import formats_of, row_chunks, scale_of

_TABLE_ROW = 512
"""What a row of ``tid2eid`` counts as: every expert is drawn for it."""
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16}


class Weights(Protocol):
    """Where values come from; ``rows`` are those of one chunk of :func:`.formats.row_chunks`."""

    def plain(self, key: str, rows: range, width: int) -> torch.Tensor: ...

    def quantized(self, key: str, rows: range, width: int, form: str) -> tuple[torch.Tensor, torch.Tensor]: ...

    def integers(self, key: str, rows: range, width: int) -> torch.Tensor: ...


def write_tensors(
    files: ShardedFiles, table: Mapping[str, TensorSpec], weights: Weights, on_bytes: Callable[[int], None]
) -> None:
    """Fills ``files`` with all of ``table``; ``on_bytes`` is told what was written."""
    formats = formats_of(table)
    scales = {scale_of(key) for key in formats}
    for key, spec in table.items():
        if key in scales:
            continue  # written beside its weight
        form = formats.get(key, "")
        n_rows, width = spec.shape if len(spec.shape) > 1 else (spec.shape[0], 1)
        width *= 2 if form == "fp4" else 1
        for rows in row_chunks(n_rows, _TABLE_ROW if spec.dtype == "I64" else width):
            if form:
                codes, scale = weights.quantized(key, rows, width, form)
                begin = rows.start // WEIGHT_BLOCK if form == "fp8" else rows.start
                n = files.write(scale_of(key), begin * scale.shape[1], scale)
            elif spec.dtype == "I64":
                codes, n = weights.integers(key, rows, width), 0
            else:
                codes, n = weights.plain(key, rows, width).to(_TORCH[spec.dtype]), 0
            on_bytes(n + files.write(key, rows.start * codes.shape[1] * codes.element_size(), codes))
    files.finish()
