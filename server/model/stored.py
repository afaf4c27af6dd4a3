"""Weights that stay in the files of their checkpoint: mapped into memory, made numbers when they are used.

A :class:`StoredCheckpoint` holds the maps. The kernels read them by themselves (``server/kernels/packing.py``); the
model in Python asks a :class:`StoredWeight` for its numbers, one use at a time. Either way the bytes of the maps that
are part of the process stay below the checkpoint's budget, and what goes is read from the file again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import torch
from torch import nn

from server.model.checkpoint import StoredTensor
from server.model.config import CheckpointError
from server.model.interface import WeightsState
from server.model.quantization import dequantize_fp4, dequantize_fp8
from server.model.tensor_files import TensorHeader

TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""What can stay in its file, by the words of safetensors."""


class WeightsUnreadable(RuntimeError):
    """A weight cannot be read from its file any more: the file was cut off, or its disk fails."""


class Use(Enum):
    """Who reads a weight: the router's choice (an expert), every step, or every step a few rows (the embedding)."""

    BY_CHOICE = 0
    EVERY_STEP = 1
    BY_ROW = 2


class MappedFile:
    """One file, mapped to be read only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._map = mmap.mmap(self._descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be mapped into memory: {error}") from error
        array = np.frombuffer(self._map, dtype=np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written is what we want
            self._bytes = torch.from_numpy(array)
        self.address: int = array.ctypes.data
        self.nbytes = len(array)

    def tensor(self, header: TensorHeader) -> torch.Tensor:
        """A tensor as it is stored; a view of the map where its place allows that."""
        if os.fstat(self._descriptor).st_size < header.offset + header.nbytes:
            raise WeightsUnreadable(f"{self.path} has become shorter: {header.key} cannot be read any more")
        stored = self._bytes[header.offset : header.offset + header.nbytes]
        dtype = TYPES[header.dtype]
        if header.offset % dtype.itemsize:
            stored = stored.clone()
        return stored.view(dtype).view(header.shape)

    def let_go(self, header: TensorHeader) -> None:
        """The pages of a tensor are not part of this process any more, until they are read again."""
        begin = header.offset - header.offset % mmap.PAGESIZE
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_DONTNEED, begin, header.offset + header.nbytes - begin)


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """One weight ``[out, in]`` in its file. ``dtype`` is that of its numbers in the model."""

    checkpoint: StoredCheckpoint
    tensor: StoredTensor
    dtype: torch.dtype
    use: Use

    @property
    def key(self) -> str:
        return self.tensor.data.key

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def headers(self) -> tuple[TensorHeader, ...]:
        return (self.tensor.data,) if self.tensor.scale is None else (self.tensor.data, self.tensor.scale)

    @property
    def nbytes(self) -> int:
        """In the file."""
        return sum(header.nbytes for header in self.headers)

    @property
    def numbers_nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def address(self, header: TensorHeader) -> int:
        """Where one of :attr:`headers` begins in memory."""
        return self.checkpoint.file(header).address + header.offset

    def numbers(self) -> torch.Tensor:
        """The weight as the model computes with it, the same bits as if it had been loaded. Raises
        :class:`WeightsUnreadable`.
        """
        self.checkpoint.use(self)
        return _numbers(*(self.checkpoint.file(header).tensor(header) for header in self.headers)).to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows of a weight that is not quantized."""
        self.checkpoint.use(self)
        data = self.tensor.data
        return self.checkpoint.file(data).tensor(data)[ids].to(self.dtype)


def _numbers(data: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    if scale is None:
        return data
    return dequantize_fp4(data, scale) if data.dtype == torch.int8 else dequantize_fp8(data, scale)


class StoredEmbedding(nn.Module):
    """Takes the place of an embedding whose table stays in its file."""

    def __init__(self, stored: StoredWeight) -> None:
        super().__init__()
        self.stored = stored

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.stored.rows(ids)


@dataclass
class StoredCheckpoint:
    """The mapped files of a checkpoint. ``budget`` is in bytes, for all weights: ``loaded_nbytes`` of them are in
    memory as ever (norms, routers, hyper-connections), the rest is for what is mapped.

    What the model in Python used is let go in the order of its last use.
    """

    budget: int
    loaded_nbytes: int = 0
    weights: dict[str, StoredWeight] = field(default_factory=dict)
    """By parameter name, in the order of the network."""
    _files: dict[Path, MappedFile] = field(default_factory=dict)
    _used: OrderedDict[StoredWeight, int] = field(default_factory=OrderedDict)
    _hits: int = 0
    _misses: int = 0
    _evictions: int = 0
    _read_nbytes: int = 0
    _resident_nbytes: int = 0
    _aside_nbytes: int = 0

    def file(self, header: TensorHeader) -> MappedFile:
        if header.file not in self._files:
            self._files[header.file] = MappedFile(header.file)
        return self._files[header.file]

    def check_budget(self, smallest: int) -> None:
        """Raises :class:`CheckpointError` if the budget is below ``smallest``, beside what is loaded."""
        if self.budget < smallest + self.loaded_nbytes:
            raise CheckpointError(
                f"--weights-memory {self.budget}: this checkpoint needs at least {smallest + self.loaded_nbytes} bytes "
                f"({-(-(smallest + self.loaded_nbytes) >> 20)}MiB): {self.loaded_nbytes} for small tensors that are "
                f"always in memory, {smallest} for those that pass through"
            )

    def reserve(self, layers: Iterable[Iterable[StoredWeight]]) -> None:
        """For the model in Python: keeps room for the numbers of the largest of ``layers``, the weights that are made
        numbers at the same time. Raises :class:`CheckpointError`.
        """
        layers = [list(each) for each in layers]
        self._aside_nbytes = max((sum(w.numbers_nbytes for w in each) for each in layers), default=0)
        largest = max((sum(w.nbytes for w in each) for each in layers), default=0)
        self.check_budget(self._aside_nbytes + largest)

    def use(self, weight: StoredWeight) -> None:
        """A weight is read now. Others go until it fits."""
        if weight in self._used:
            self._hits += 1
            self._used.move_to_end(weight)
            return
        room = self.budget - self.loaded_nbytes - self._aside_nbytes
        while self._used and self._resident_nbytes + weight.nbytes > room:
            oldest, nbytes = self._used.popitem(last=False)
            for header in oldest.headers:
                self.file(header).let_go(header)
            self._resident_nbytes -= nbytes
            self._evictions += 1
        self._misses += 1
        self._used[weight] = weight.nbytes
        self._read_nbytes += weight.nbytes
        self._resident_nbytes += weight.nbytes

    def state(self) -> WeightsState:
        return WeightsState(
            mode="packed",
            budget_nbytes=self.budget,
            loaded_nbytes=self.loaded_nbytes,
            resident_nbytes=self._resident_nbytes,
            read_nbytes=self._read_nbytes,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )
