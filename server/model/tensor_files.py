"""The safetensors files of a checkpoint and what their headers say. It imports no torch and reads no tensor."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from server.model.fields import CheckpointError

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a file's header describes it; ``dtype`` in the file's word (``F32``, ``BF16``)."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def tensor_files(model_dir: Path) -> list[Path]:
    """The files that hold the weights, by name. Raises :class:`CheckpointError` if one, or all, are missing."""
    index = model_dir / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [model_dir / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(
                f"{model_dir}: {_INDEX} names {missing[0]}, which is not there ({len(missing)} of {len(files)} missing)"
            )
        return files
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir} has no *.safetensors file")
    return files


def tensor_headers(model_dir: Path) -> list[TensorHeader]:
    """Every tensor of the checkpoint. Raises :class:`CheckpointError` for a file that is missing, cut off or no
    safetensors file.
    """
    return [header for file in tensor_files(model_dir) for header in _headers(file)]


def _headers(file: Path) -> list[TensorHeader]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            parts = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118  (safe_open is no mapping)
            return [TensorHeader(file, key, part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()]
    except Exception as error:  # safetensors raises its own untyped error
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
