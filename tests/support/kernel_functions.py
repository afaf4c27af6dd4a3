"""Single kernels called from tests: a library for each instruction set, matrices packed by it, arrays from tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

from server.kernels import abi
from server.kernels.build import Isa, NoCompiler, Target, build, isas_of_machine
from server.kernels.errors import KernelsUnavailable
from server.kernels.library import forced_target, load

FORCED = forced_target()
EVERY_ISA = (FORCED.isa,) if FORCED else tuple(dict.fromkeys((*isas_of_machine(), Isa.GENERIC)))
"""What a library is built for here, and the form of any other machine; only the build that a variable asks for."""

BATCHES = (1, 2, 3, 5, 6, 7, 13, 16, 17, 40)
"""Numbers of rows: below, at and above the tiles of the linear maps."""

ROWS = 101
"""Rows of a large batch: more than one block of the linear maps."""


@lru_cache
def functions(isa: Isa | None = None) -> ctypes.CDLL:
    """The library for ``isa`` (default: this machine's best), built if need be; with sanitizers where the variable asks
    for such a build. Skips the test where there is none.
    """
    try:
        target = FORCED if isa is None else Target(isa, sanitized=FORCED is not None and FORCED.sanitized)
        build([] if target is None else [target])
        library = load(target)
    except (NoCompiler, KernelsUnavailable) as error:
        pytest.skip(str(error))
    abi.declare(library.functions, str(library.path))
    return library.functions


class Kernels:
    """Calls into one library. Tensors are passed as pointers; they and what was packed live as long as this."""

    def __init__(self, isa: Isa | None = None) -> None:
        self.functions = functions(isa)
        self.memory: list[object] = []

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.functions, name)(*(self.argument(a) for a in arguments))
        assert status == abi.Status.OK, f"{name}: {abi.Status(status).name}"

    def keep(self, tensor: torch.Tensor) -> int:
        """Where a contiguous copy of ``tensor`` begins."""
        tensor = tensor.contiguous().clone()
        self.memory.append(tensor)
        return tensor.data_ptr()

    def matrix(self, weight: torch.Tensor) -> abi.Matrix:
        """``weight`` ``[out, in]``, fp32 or bf16, packed."""
        dtype = abi.Dtype.BF16 if weight.dtype == torch.bfloat16 else abi.Dtype.FP32
        n_out, n_in = weight.shape
        weight = weight.contiguous()
        nbytes = self.functions.kernels_packed_nbytes(n_out, n_in, dtype)
        place = torch.empty(nbytes, dtype=torch.uint8)
        self.memory.append(place)
        made = abi.Matrix()
        self.functions.kernels_pack(weight.data_ptr(), n_out, n_in, dtype, place.data_ptr(), made)
        return made

    def matrices(self, weights: Sequence[torch.Tensor]) -> Any:
        return (abi.Matrix * len(weights))(*(self.matrix(weight) for weight in weights))

    def argument(self, value: Any) -> Any:
        """``value`` as a function of the library takes it."""
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous()
            self.memory.append(value)
            return ctypes.c_void_p(value.data_ptr())
        if isinstance(value, ctypes.Structure):
            return ctypes.byref(value)
        return ctypes.c_int64(value) if isinstance(value, int) else value


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 numbers, with one NaN for all."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor).view(torch.int32)


def assert_rows_do_not_matter(compute: Callable[[slice, int], torch.Tensor]) -> None:
    """``compute(rows, threads)`` gives every row the same bits, alone or in a batch, with any number of threads."""
    whole = bits(compute(slice(0, ROWS), 1))
    for n in BATCHES:
        start = n % 4
        for threads in (1, 2, 3):
            part = compute(slice(start, start + n), threads)
            assert torch.equal(bits(part), whole[start : start + n]), f"{n} rows, {threads} threads"
    assert torch.equal(bits(compute(slice(0, ROWS), 2)), whole), "all rows, 2 threads"
