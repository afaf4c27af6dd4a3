"""The safetensors files of a checkpoint, written piece by piece: no tensor is ever in memory as a whole.

`safetensors` itself writes a file only from whole tensors. Its format is simple: the length of the header in 8 bytes,
the header in JSON, then the data without gaps. The order is the library's own, so that the same tensors make the same
file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from server.model.official_tensors import TensorSpec

MAX_SHARDS = 1000
INDEX = "model.safetensors.index.json"
_ORDER = ("I64", "F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")
"""Tensors of one file lie in this order of their dtypes: each is aligned then."""


class FilesError(ValueError):
    """Files that cannot be written as asked for."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's data begins."""

    file: Path
    offset: int


class ShardedFiles:
    """Files of at most ``shard_nbytes`` (more only for a larger tensor), and their index if there are several.

    Made at their full size; :meth:`write` fills them, :meth:`finish` checks that nothing is left.
    """

    def __init__(self, folder: Path, table: Mapping[str, TensorSpec], shard_nbytes: int) -> None:
        self._left = {key: spec.nbytes for key, spec in table.items()}
        self._places: dict[str, Place] = {}
        shards = list(shards_of(table, shard_nbytes))
        if len(shards) > MAX_SHARDS:
            raise FilesError(f"{len(shards)} shards are more than {MAX_SHARDS}: give a larger --shard-size")
        for i, keys in enumerate(shards):
            name = "model" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}"
            self._begin(folder / f"{name}.safetensors", {key: table[key] for key in keys})
        if len(shards) > 1:
            total = sum(spec.nbytes for spec in table.values())
            weight_map = {key: self._places[key].file.name for key in table}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    @property
    def n_files(self) -> int:
        return len({place.file for place in self._places.values()})

    def _begin(self, file: Path, tensors: dict[str, TensorSpec]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        offsets = {}
        for key in sorted(tensors, key=lambda key: (_ORDER.index(tensors[key].dtype), key)):
            spec = tensors[key]
            offsets[key] = end
            end += spec.nbytes
            header[key] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offsets[key], end]}
        words = json.dumps(header, separators=(",", ":")).encode()
        words += b" " * (-len(words) % 8)
        with file.open("xb") as stream:
            stream.write(len(words).to_bytes(8, "little") + words)
            begin = stream.tell()
            stream.truncate(begin + end)
        self._places |= {key: Place(file, begin + offset) for key, offset in offsets.items()}

    def write(self, key: str, offset: int, values: torch.Tensor) -> int:
        """Writes the elements of ``values`` from byte ``offset`` of a tensor on; returns their bytes."""
        data = values.contiguous().view(torch.uint8).numpy().data
        place = self._places[key]
        with place.file.open("r+b", buffering=0) as stream:
            stream.seek(place.offset + offset)
            written = stream.write(data)
        if written != data.nbytes:
            raise OSError(f"{place.file}: {written} of {data.nbytes} bytes were written: is the disk full?")
        self._left[key] -= written
        return written

    def finish(self) -> None:
        """Raises :class:`RuntimeError` unless as many bytes were written as every tensor has."""
        if unfinished := [key for key, left in self._left.items() if left]:
            raise RuntimeError(f"{len(unfinished)} tensors were not written in full, such as {unfinished[0]}")


def shards_of(table: Mapping[str, TensorSpec], shard_nbytes: int) -> Iterator[list[str]]:
    """The keys of each file, in the order of the table."""
    keys: list[str] = []
    nbytes = 0
    for key, spec in table.items():
        if keys and nbytes + spec.nbytes > shard_nbytes:
            yield keys
            keys, nbytes = [], 0
        keys.append(key)
        nbytes += spec.nbytes
    if keys:
        yield keys
