"""The safetensors files of a checkpoint and what their headers say. It imports no torch and reads no tensor."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from server.model.fields import CheckpointError

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*-)(\d+)-of-(\d+)\.safetensors")
_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "BF16": 16,
    "F16": 16,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
_MAX_HEADER_NBYTES = 100_000_000
"""What safetensors takes."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a file's header describes it: ``dtype`` in the file's word (``F32``, ``BF16``), and its ``nbytes``
    bytes from ``offset`` on, counted from the file's first byte.
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def tensor_files(model_dir: Path) -> list[Path]:
    """The files that hold the weights, by name. Raises :class:`CheckpointError` if one, or all, are missing, or if the
    index cannot be read.
    """
    index = read_index(model_dir)
    if index is not None:
        return _files_of_index(model_dir, index)
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir} has no *.safetensors file")
    if missing := _missing_in_row([file.name for file in files]):
        raise CheckpointError(
            f"{model_dir}: {missing[0]} is not there ({len(missing)} missing by the numbers in the files' names)"
        )
    return files


def read_index(model_dir: Path) -> dict[str, str] | None:
    """The file of each key, as the index says it; None without an index. Raises :class:`CheckpointError`."""
    path = model_dir / INDEX
    if not path.is_file():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty; it must give the file of each tensor")
    for key, name in weight_map.items():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {key} is in {name!r}, which is no *.safetensors file of this directory")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises :class:`CheckpointError` if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _files_of_index(model_dir: Path, index: Mapping[str, str]) -> list[Path]:
    names = sorted(set(index.values()))
    if missing := [name for name in names if not (model_dir / name).is_file()]:
        keys = [key for key, name in index.items() if name == missing[0]]
        raise CheckpointError(
            f"{model_dir}: {INDEX} names {missing[0]}, which is not there ({len(missing)} of {len(names)} missing); "
            f"it would hold {keys[0]} and {len(keys) - 1} more"
        )
    return [model_dir / name for name in names]


def _missing_in_row(names: list[str]) -> list[str]:
    """Names that the others call for: ``model-00002-of-00003.safetensors`` beside the first and the third."""
    numbered = [match for name in names if (match := _SHARD.fullmatch(name))]
    wanted = {
        f"{match[1]}{i:0{len(match[2])}}-of-{match[3]}.safetensors"
        for match in numbered
        if int(match[3]) <= 10 * len(names) + 100  # else the number is no count
        for i in range(1, int(match[3]) + 1)
    }
    return sorted(wanted - set(names))


def tensor_headers(model_dir: Path) -> list[TensorHeader]:
    """Every tensor of the checkpoint, file by file, in the order of their bytes.

    Raises :class:`CheckpointError` for a file that is missing, cut off or no safetensors file, for a key that is in two
    of them, and for an index that says something else than they do.
    """
    index = read_index(model_dir)
    headers: dict[str, TensorHeader] = {}
    for file in tensor_files(model_dir):
        for header in file_headers(file):
            if (other := headers.setdefault(header.key, header)) is not header:
                raise CheckpointError(f"{model_dir}: {header.key} is in two files, {other.file.name} and {file.name}")
    if index is not None:
        _check_index(model_dir, index, headers)
    return list(headers.values())


def _check_index(model_dir: Path, index: Mapping[str, str], headers: Mapping[str, TensorHeader]) -> None:
    for key, name in index.items():
        if key not in headers:
            raise CheckpointError(f"{model_dir / name}: {key} is not in it, although {INDEX} says so")
        if headers[key].file.name != name:
            raise CheckpointError(f"{model_dir}: {key} is in {headers[key].file.name}, but {INDEX} says in {name}")
    if unlisted := [header for key, header in headers.items() if key not in index]:
        raise CheckpointError(f"{unlisted[0].file}: {unlisted[0].key} is in it, but not in {INDEX}")


def file_headers(file: Path) -> list[TensorHeader]:
    """The tensors of one file, in the order of their bytes. Raises :class:`CheckpointError`."""
    try:
        with file.open("rb") as stream:
            offset = 8 + int.from_bytes(stream.read(8), "little")
        with safe_open(file, framework="numpy") as tensors:  # it checks that tensors and bytes fit without a gap
            parts = [(key, tensors.get_slice(key)) for key in tensors.offset_keys()]
            described = [(key, part.get_dtype(), tuple(part.get_shape())) for key, part in parts]
    except Exception as error:  # safetensors raises its own untyped error
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}{_cut_off(file)}") from error
    headers = []
    for key, dtype, shape in described:
        if dtype not in _BITS:
            raise CheckpointError(f"{file}: {key} has the dtype {dtype}, which no checkpoint of this model has")
        nbytes = math.prod(shape) * _BITS[dtype] // 8
        headers.append(TensorHeader(file, key, dtype, shape, offset, nbytes))
        offset += nbytes
    if offset != file.stat().st_size:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes, its header tells of {offset}")
    return headers


def _cut_off(file: Path) -> str:
    """What to say of a file that ends too early: the first tensor that is not whole. Empty for any other damage."""
    try:
        end = file.stat().st_size
        with file.open("rb") as stream:
            n_header = int.from_bytes(stream.read(8), "little")
            if n_header > min(end, _MAX_HEADER_NBYTES):
                return " (it ends within its header)" if end < n_header <= _MAX_HEADER_NBYTES else ""
            described = json.loads(stream.read(n_header))
        ends = {key: 8 + n_header + part["data_offsets"][1] for key, part in described.items() if key != "__metadata__"}
        cut = sorted((stop, key) for key, stop in ends.items() if stop > end)
        return f" (cut off in {cut[0][1]}: {end} bytes of {cut[-1][0]})" if cut else ""
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
