"""Weights that stay in the files of a checkpoint, as the kernels read them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from server.kernels import abi
from server.model.interface import WeightsState
from server.model.stored import StoredCheckpoint, StoredWeight, WeightsUnreadable

_ENCODINGS = {
    "F32": abi.Encoding.STORED_FP32,
    "BF16": abi.Encoding.STORED_BF16,
    "F8_E4M3": abi.Encoding.STORED_FP8,
    "I8": abi.Encoding.STORED_FP4,
}


class StoredMatrices:
    """The mapped weights of ``checkpoint`` under its budget. Raises :class:`CheckpointError` where that is small."""

    def __init__(self, checkpoint: StoredCheckpoint, library: ctypes.CDLL) -> None:
        self._checkpoint, self._library = checkpoint, library
        self._weights = list(checkpoint.weights.values())
        self._numbers = {name: i for i, name in enumerate(checkpoint.weights)}
        self._memory: list[object] = []
        tensors = (abi.StoredTensor * len(self._weights))(*(_tensor(weight) for weight in self._weights))
        checkpoint.check_budget(library.kernels_weights_smallest(tensors, len(tensors)))
        budget = checkpoint.budget - checkpoint.loaded_nbytes
        self._handle = library.kernels_weights(tensors, len(tensors), budget)
        if not self._handle:
            raise MemoryError(f"no memory for the list of {len(tensors)} stored weights")
        weakref.finalize(self, library.kernels_weights_free, self._handle)

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def matrix(self, *names: str) -> abi.Matrix:
        """The weights of these names, one below the other."""
        weights = [self._weights[self._numbers[name]] for name in names]
        parts = [
            abi.StoredPart(self._numbers[name], 0, 0, weight.shape[0])
            for name, weight in zip(names, weights, strict=True)
        ]
        return self._made([parts], weights[0].shape[1])

    def row_groups(self, name: str, count: int) -> abi.GroupedMatrix:
        """Equal groups of the rows of a weight."""
        rows, columns = self._shape(name)
        step = rows // count
        parts = [[abi.StoredPart(self._numbers[name], i * step, 0, step)] for i in range(count)]
        return abi.GroupedMatrix(first=self._made(parts, columns), groups=count)

    def column_groups(self, name: str, count: int) -> abi.GroupedMatrix:
        """Equal groups of the columns of a weight."""
        rows, columns = self._shape(name)
        step = columns // count
        parts = [[abi.StoredPart(self._numbers[name], 0, i * step, rows)] for i in range(count)]
        return abi.GroupedMatrix(first=self._made(parts, step), groups=count)

    def table(self, name: str) -> ctypes.Array[abi.StoredMatrix]:
        """A weight whose rows are gathered."""
        return self._structures([[abi.StoredPart(self._numbers[name], 0, 0, self._shape(name)[0])]])

    def _shape(self, name: str) -> tuple[int, int]:
        rows, columns = self._weights[self._numbers[name]].shape
        return rows, columns

    def _made(self, matrices: Sequence[Sequence[abi.StoredPart]], n_in: int) -> abi.Matrix:
        """The first of some matrices that lie one behind the other."""
        n_out = sum(part.rows for part in matrices[0])
        made = abi.Matrix(stored=self._structures(matrices), out=n_out)
        setattr(made, "in", n_in)
        return made

    def _structures(self, matrices: Sequence[Sequence[abi.StoredPart]]) -> ctypes.Array[abi.StoredMatrix]:
        made = (abi.StoredMatrix * len(matrices))()
        for one, parts in zip(made, matrices, strict=True):
            listed = (abi.StoredPart * len(parts))(*parts)
            self._memory.append(listed)
            one.weights, one.parts, one.n_parts = self._handle, listed, len(parts)
        self._memory.append(made)
        return made

    def state(self) -> WeightsState:
        hits, misses, evictions, read, resident, _ = self._counts()
        return WeightsState(
            mode="packed",
            budget_nbytes=self._checkpoint.budget,
            loaded_nbytes=self._checkpoint.loaded_nbytes,
            resident_nbytes=resident,
            read_nbytes=read,
            hits=hits,
            misses=misses,
            evictions=evictions,
        )

    def failure(self) -> WeightsUnreadable:
        """What to raise when the kernels could not read a weight."""
        number = self._counts()[5]
        if number < 0:
            return WeightsUnreadable("a weight cannot be read from its file any more")
        data = self._weights[number].tensor.data
        return WeightsUnreadable(
            f"{data.file}: {data.key} cannot be read any more: the file has become shorter or its disk fails"
        )

    def _counts(self) -> list[int]:
        out = (ctypes.c_int64 * 6)()
        self._library.kernels_weights_state(self._handle, out)
        return list(out)


def _tensor(weight: StoredWeight) -> abi.StoredTensor:
    tensor = weight.tensor
    rows, columns = weight.shape
    file = weight.checkpoint.file(tensor.data)
    scale_file = None if tensor.scale is None else weight.checkpoint.file(tensor.scale)
    return abi.StoredTensor(
        data=weight.address(tensor.data),
        scale=None if tensor.scale is None else weight.address(tensor.scale),
        map=file.address,
        scale_map=None if scale_file is None else scale_file.address,
        map_nbytes=file.nbytes,
        scale_map_nbytes=0 if scale_file is None else scale_file.nbytes,
        rows=rows,
        columns=columns,
        encoding=_ENCODINGS[tensor.data.dtype],
        rounds=weight.dtype == torch.bfloat16,
        use=weight.use.value,
    )
