"""Maps whose weights stay in their files: the same bits as in memory, whatever the budget; and files that are cut."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from server.kernels import abi
from server.kernels.build import Isa
from server.model.quantization import dequantize_fp4, dequantize_fp8, quantize_fp4, quantize_fp8
from tests.support.kernel_functions import EVERY_ISA, FORCED, ROWS, Kernels, assert_rows_do_not_matter, bits

ENCODINGS = list(abi.Encoding)
SHAPES = [(1, 2), (7, 6), (16, 128), (24, 1026), (64, 126), (65, 130), (130, 384), (257, 510), (33, 2048), (700, 320)]
"""(out, in): parts of a panel and several, of blocks of scales and several, and odd rests."""
ALL = 1 << 30


class File:
    """Tensors one behind the other in a file, at odd places, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"head")
        self._made: list[tuple[int, int | None, abi.StoredTensor]] = []

    def add(self, weight: torch.Tensor, encoding: abi.Encoding, *, rounds: bool = False, use: int = 1) -> torch.Tensor:
        """Stores ``weight`` and returns the numbers that it then stands for."""
        codes, scale, numbers = stored_as(weight, encoding)
        place, scale_place = self._append(codes), None if scale is None else self._append(scale)
        rows, columns = weight.shape
        tensor = abi.StoredTensor(rows=rows, columns=columns, encoding=encoding, rounds=rounds, use=use)
        self._made.append((place, scale_place, tensor))
        return numbers.bfloat16().float() if rounds else numbers

    def _append(self, tensor: torch.Tensor) -> int:
        with self.path.open("ab") as stream:
            place = stream.tell()
            stream.write(tensor.contiguous().view(torch.uint8).numpy().tobytes() + b"+")
        return place

    def tensors(self) -> ctypes.Array[abi.StoredTensor]:
        with self.path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        for place, scale_place, tensor in self._made:
            tensor.data = address + place
            tensor.scale = None if scale_place is None else address + scale_place
            tensor.map = tensor.scale_map = address
            tensor.map_nbytes = tensor.scale_map_nbytes = len(self._map)
        return (abi.StoredTensor * len(self._made))(*(tensor for _, _, tensor in self._made))


def stored_as(weight: torch.Tensor, encoding: abi.Encoding) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    if encoding == abi.Encoding.STORED_FP8:
        codes, scale = quantize_fp8(weight)
        return codes, scale, dequantize_fp8(codes, scale)
    if encoding == abi.Encoding.STORED_FP4:
        codes, scale = quantize_fp4(weight)
        return codes, scale, dequantize_fp4(codes, scale)
    plain = weight.bfloat16() if encoding == abi.Encoding.STORED_BF16 else weight
    return plain, None, plain.float()


class Weights:
    """What the kernels hold of a :class:`File`; ``budget`` in bytes beside the smallest."""

    def __init__(self, kernels: Kernels, file: File, budget: int = ALL) -> None:
        self.kernels, self.file = kernels, file
        tensors = file.tensors()
        smallest = kernels.functions.kernels_weights_smallest(tensors, len(tensors))
        self.handle = kernels.functions.kernels_weights(tensors, len(tensors), smallest + budget)
        self.smallest = smallest
        self.memory: list[object] = []

    def matrix(self, *parts: tuple[int, int, int, int], n_in: int) -> abi.Matrix:
        """Parts: tensor, first row, first column, rows."""
        listed = (abi.StoredPart * len(parts))(*(abi.StoredPart(*part) for part in parts))
        stored = (abi.StoredMatrix * 1)(abi.StoredMatrix(self.handle, listed, len(parts)))
        self.memory += [listed, stored]
        made = abi.Matrix(stored=stored, out=sum(part[3] for part in parts))
        setattr(made, "in", n_in)
        return made

    def linear(self, matrix: abi.Matrix, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
        out = torch.full((len(x), matrix.out), -1.0)
        self.kernels.call("kernels_linear", matrix, x.contiguous(), len(x), out, threads)
        return out

    def counts(self) -> dict[str, int]:
        out = (ctypes.c_int64 * 6)()
        self.kernels.functions.kernels_weights_state(self.handle, out)
        return dict(zip(("hits", "misses", "evictions", "read", "resident", "failed"), out, strict=True))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_memory(kernels: Kernels, numbers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), len(numbers))
    kernels.call("kernels_linear", kernels.matrix(numbers), x.contiguous(), len(x), out, 1)
    return out


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_map_of_a_stored_weight_is_that_of_its_numbers(tmp_path: Path, encoding: abi.Encoding, isa: Isa) -> None:
    kernels = Kernels(isa)
    for n_out, n_in in SHAPES:
        file = File(tmp_path / f"{n_out}x{n_in}")
        numbers, x = file.add(random(n_out, n_in), encoding), random(ROWS, n_in, seed=1)
        weights = Weights(kernels, file)
        matrix = weights.matrix((0, 0, 0, n_out), n_in=n_in)
        wanted = in_memory(kernels, numbers, x)
        for n in (1, 2, 3, 7, ROWS):
            assert torch.equal(bits(weights.linear(matrix, x[:n])), bits(wanted[:n])), (n_out, n_in, n)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_row_does_not_depend_on_the_batch_or_the_threads(tmp_path: Path, encoding: abi.Encoding) -> None:
    file = File(tmp_path / "file")
    file.add(random(700, 330), encoding)
    weights, x = Weights(Kernels(), file), random(ROWS, 330, seed=1)
    matrix = weights.matrix((0, 0, 0, 700), n_in=330)
    assert_rows_do_not_matter(lambda rows, threads: weights.linear(matrix, x[rows], threads))


def codes_of(encoding: abi.Encoding) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every code under many scales: as stored, and the numbers that they stand for."""
    several = torch.tensor([0, 1, 2, 3, 4, 126, 127, 128, 134, 135, 200, 253, 254, 255], dtype=torch.uint8)
    every = torch.arange(256, dtype=torch.uint8)
    if encoding == abi.Encoding.STORED_FP8:
        codes = every.roll(128).repeat(130, len(several) // 2).view(torch.float8_e4m3fn)
        scale = torch.stack([several, several.flip(0)])
        return codes, scale, dequantize_fp8(codes, scale)
    codes = every.repeat(7, 1).view(torch.int8)
    scale = several.repeat(9)[: 7 * 16].view(7, 16)
    return codes, scale, dequantize_fp4(codes, scale)


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("encoding", [abi.Encoding.STORED_FP8, abi.Encoding.STORED_FP4])
@pytest.mark.parametrize("rounds", [False, True])
def test_every_code_under_every_kind_of_scale(encoding: abi.Encoding, isa: Isa, rounds: bool) -> None:
    functions = Kernels(isa).functions
    codes, scale, numbers = codes_of(encoding)
    rows, columns = numbers.shape
    numbers = numbers.bfloat16().float() if rounds else numbers
    tensor = abi.StoredTensor(
        data=codes.data_ptr(), scale=scale.data_ptr(), rows=rows, columns=columns, encoding=encoding, rounds=rounds
    )
    for row, count, column, length in ((0, 7, 0, columns), (1, 3, 2, 251), (rows - 5, 5, 30, 100), (0, 1, 50, 16)):
        out = torch.full((length, 16), -1.0)
        functions.kernels_expand(tensor_pointer(tensor), *map(ctypes.c_int64, (row, count, column, length, 16)),
                                 ctypes.c_void_p(out.data_ptr()))  # fmt: skip
        wanted = numbers[row : row + count, column : column + length]
        assert torch.equal(bits(out[:, :count]), bits(wanted.t())), (row, count, column, length)
        one = torch.full((length,), -1.0)
        functions.kernels_expand_row(tensor_pointer(tensor), *map(ctypes.c_int64, (row, column, length)),
                                     ctypes.c_void_p(one.data_ptr()))  # fmt: skip
        assert torch.equal(bits(one), bits(wanted[0]))


def tensor_pointer(tensor: abi.StoredTensor) -> ctypes.c_void_p:
    return ctypes.cast(ctypes.pointer(tensor), ctypes.c_void_p)


def test_rounding_is_that_of_a_weight_loaded_as_bf16(tmp_path: Path) -> None:
    file = File(tmp_path / "file")
    numbers, x = file.add(random(70, 300), abi.Encoding.STORED_FP32, rounds=True), random(9, 300, seed=1)
    weights = Weights(Kernels(), file)
    wanted = in_memory(Kernels(), numbers.bfloat16(), x)
    assert torch.equal(bits(weights.linear(weights.matrix((0, 0, 0, 70), n_in=300), x)), bits(wanted))


def test_parts_of_several_tensors_and_groups_of_rows_and_columns(tmp_path: Path) -> None:
    file, kernels = File(tmp_path / "file"), Kernels()
    first = file.add(random(300, 130), abi.Encoding.STORED_FP8)
    second = file.add(random(33, 130, seed=2), abi.Encoding.STORED_BF16)
    x = random(11, 130, seed=1)
    weights = Weights(kernels, file)
    both = weights.matrix((0, 0, 0, 300), (1, 0, 0, 33), n_in=130)
    assert torch.equal(bits(weights.linear(both, x)), bits(in_memory(kernels, torch.cat([first, second]), x)))
    rows = weights.matrix((0, 150, 0, 150), n_in=130)
    assert torch.equal(bits(weights.linear(rows, x)), bits(in_memory(kernels, first[150:], x)))
    for start, stop in ((0, 65), (65, 130), (26, 52), (1, 3)):
        columns = weights.matrix((0, 0, start, 300), n_in=stop - start)
        wanted = in_memory(kernels, first[:, start:stop].contiguous(), x[:, start:stop])
        assert torch.equal(bits(weights.linear(columns, x[:, start:stop])), bits(wanted))


MANY = 6
"""Weights of some slabs each."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("budget", [0, 10 << 20, ALL])
@pytest.mark.parametrize("use", [0, 1])
def test_budget_changes_no_bit_and_is_kept(tmp_path: Path, budget: int, use: int, threads: int) -> None:
    file, kernels = File(tmp_path / "file"), Kernels()
    numbers = [file.add(random(1100, 3000, seed=i), abi.Encoding.STORED_FP8, use=use) for i in range(MANY)]
    x = random(2, 3000, seed=9)
    wanted = [in_memory(kernels, each, x) for each in numbers]
    weights = Weights(kernels, file, budget)
    matrices = [weights.matrix((i, 0, 0, 1100), n_in=3000) for i in range(MANY)]
    for _ in range(3):
        for matrix, expected in zip(matrices, wanted, strict=True):
            assert torch.equal(bits(weights.linear(matrix, x, threads)), bits(expected))
            assert weights.counts()["resident"] <= weights.smallest + budget
    counts = weights.counts()
    n_slabs = counts["misses"] if budget == ALL else (counts["hits"] + counts["misses"]) // 3
    if budget == ALL:
        assert counts["hits"] == 2 * n_slabs
        assert counts["evictions"] == 0
        assert counts["read"] >= MANY * 1100 * 3000
    elif use == 1 and budget:
        assert counts["hits"] > 0, "what every step reads is kept in part, where not all of it fits"
        assert counts["evictions"] > 0
    elif use == 0:
        assert counts["evictions"] > n_slabs


def test_expert_that_was_used_last_stays(tmp_path: Path) -> None:
    file, kernels = File(tmp_path / "file"), Kernels()
    for i in range(4):
        file.add(random(128, 8192, seed=i), abi.Encoding.STORED_FP8, use=0)
    x = random(1, 8192, seed=9)
    weights = Weights(kernels, file, 3 << 20)  # with the smallest budget, that is room for four slabs of 1 MiB or so
    matrices = [weights.matrix((i, 0, 0, 128), n_in=8192) for i in range(4)]
    for i in (0, 1, 2, 3, 3, 2, 3):
        weights.linear(matrices[i], x)
    before = weights.counts()
    weights.linear(matrices[3], x)
    assert weights.counts()["hits"] == before["hits"] + 1
    assert weights.counts()["misses"] == before["misses"]


@pytest.mark.skipif(
    FORCED is not None and FORCED.sanitized, reason="the sanitizer, loaded before libstdc++, cannot follow exceptions"
)
def test_file_that_was_cut_off_is_a_status_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    file, kernels = File(tmp_path / "file"), Kernels()
    file.add(random(600, 1000), abi.Encoding.STORED_FP8)
    numbers = file.add(random(64, 64, seed=1), abi.Encoding.STORED_BF16)
    x, small = random(3, 1000, seed=2), random(3, 64, seed=3)
    weights = Weights(kernels, file)
    first, second = weights.matrix((0, 0, 0, 600), n_in=1000), weights.matrix((1, 0, 0, 64), n_in=64)
    whole = weights.linear(first, x)
    content = file.path.read_bytes()
    with file.path.open("r+b") as stream:
        stream.truncate(mmap.PAGESIZE)  # what was in memory is gone, too
    out = torch.empty(3, 600)
    for threads in (1, 2):
        assert kernels.functions.kernels_linear(
            *(kernels.argument(a) for a in (first, x, 3, out, threads))
        ) == abi.Status.UNREADABLE  # fmt: skip
        assert weights.counts()["failed"] == 0
    with file.path.open("r+b") as stream:
        stream.write(content)
    assert torch.equal(bits(weights.linear(first, x)), bits(whole)), "a file that is whole again is read again"
    assert torch.equal(bits(weights.linear(second, small)), bits(in_memory(kernels, numbers, small)))
