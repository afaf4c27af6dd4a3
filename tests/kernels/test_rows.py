"""Rows of pools in every format: the bytes and the values of ``server/model/row_codecs.py``, and what official numerics
round them to.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from server.cache.row_formats import Fp8IndexRow, Fp8KvRow, Mxfp4IndexRow
from server.kernels import abi
from server.kernels.build import Isa
from server.model.numerics import OFFICIAL
from server.model.row_codecs import Fp8IndexRows, Fp8KvRows, Mxfp4IndexRows, RowCodec
from tests.kernels.test_quantization import every_isa
from tests.support.kernel_functions import Kernels, bits

FP32 = torch.float32
KV = [(448, 64), (24, 8), (0, 8), (96, 2), (7, 2), (8, 6)]
INDEX = [128, 16, 6, 18]


@dataclass(frozen=True)
class Format:
    """A row format with so many channels, the last ``tail`` of them rotated."""

    number: abi.RowFormat
    channels: int
    tail: int
    codec: RowCodec
    nbytes: int

    def __str__(self) -> str:
        return f"{self.number.name} {self.channels} {self.tail}"


KV_ROWS = [Fp8KvRow(nope, tail) for nope, tail in KV]
FP4_KEYS, FP8_KEYS = [Mxfp4IndexRow(n) for n in INDEX], [Fp8IndexRow(n) for n in INDEX]
FORMATS = [
    *(Format(abi.RowFormat.FP8_KV, r.nope + r.rope, r.rope, Fp8KvRows(r, FP32), r.nbytes) for r in KV_ROWS),
    *(Format(abi.RowFormat.MXFP4_INDEX, r.width, 0, Mxfp4IndexRows(r, FP32), r.nbytes) for r in FP4_KEYS),
    *(Format(abi.RowFormat.FP8_INDEX, r.width, 0, Fp8IndexRows(r, FP32), r.nbytes) for r in FP8_KEYS),
]
every_format = pytest.mark.parametrize("row", FORMATS, ids=str)


class Rows:
    """So many rows of a format in memory that is not aligned, with a byte between them that nobody may touch."""

    def __init__(self, row: Format, n: int, isa: Isa) -> None:
        self.kernels, self.n, self.channels = Kernels(isa), n, row.channels
        stride = row.nbytes + 1
        self.memory = torch.full((1 + n * stride,), 0xFF, dtype=torch.uint8)
        self.stored = self.memory[1:].view(n, stride)
        self.pool = abi.Pool(
            data=self.memory.data_ptr() + 1, row_stride=stride, width=row.channels, dtype=row.number, tail=row.tail
        )

    def write(self, x: torch.Tensor) -> torch.Tensor:
        """The bytes of rows ``x`` ``[n, channels]``."""
        self.kernels.call("kernels_write_rows", self.pool, x, self.n)
        assert (self.stored[:, -1] == 0xFF).all()
        return self.stored[:, :-1]

    def read(self) -> torch.Tensor:
        x = torch.empty(self.n, self.channels)
        self.kernels.call("kernels_read_rows", self.pool, self.n, x)
        return x


def random_rows(n: int, channels: int) -> torch.Tensor:
    """Rows of very different magnitudes; one is zero."""
    generator = torch.Generator().manual_seed(channels)
    rows = torch.randn(n, channels, generator=generator) * torch.logspace(-9, 6, n)[:, None]
    rows[1] = 0.0
    return rows.contiguous()


@every_isa
@every_format
def test_bytes_and_values_are_those_of_the_python_pools(row: Format, isa: Isa) -> None:
    x = random_rows(40, row.channels)
    rows, expected = Rows(row, len(x), isa), row.codec.encode(x)
    assert torch.equal(rows.write(x), expected)
    assert torch.equal(bits(rows.read()), bits(row.codec.decode(expected)))


@every_isa
@every_format
def test_bytes_that_were_never_written_are_no_numbers(row: Format, isa: Isa) -> None:
    rows = Rows(row, 3, isa)
    assert rows.read().isnan().all()
    rows.stored.zero_()
    assert (rows.read() == 0).all()


@every_isa
@every_format
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_read_as_in_python(row: Format, isa: Isa, value: float) -> None:
    x = random_rows(row.channels, row.channels)
    x.fill_diagonal_(value)
    rows = Rows(row, len(x), isa)
    rows.write(x)
    assert torch.equal(bits(rows.read()), bits(row.codec.decode(row.codec.encode(x))))


def simulated(simulation: abi.Simulation, x: torch.Tensor, tail: int, isa: Isa) -> torch.Tensor:
    out = x.clone()
    Kernels(isa).call("kernels_simulate_rows", simulation, out, *x.shape, tail)
    return out


@every_isa
@pytest.mark.parametrize(("nope", "tail"), KV)
def test_kv_rows_are_rounded_as_official_numerics_say(nope: int, tail: int, isa: Isa) -> None:
    x = random_rows(40, nope + tail)
    x[3, 0] = torch.nan
    assert torch.equal(bits(simulated(abi.Simulation.AS_KV_ROW, x, tail, isa)), bits(OFFICIAL.kv_rows(x, tail)))


@every_isa
@pytest.mark.parametrize("width", [2, 16, 64, 128])
def test_index_rows_are_rounded_as_official_numerics_say(width: int, isa: Isa) -> None:
    x = random_rows(40, width)
    x[3, 0] = torch.nan
    assert torch.equal(bits(simulated(abi.Simulation.AS_INDEX_ROW, x, 0, isa)), bits(OFFICIAL.index_rows(x)))


@every_isa
def test_rows_of_plain_numerics_stay_as_they_are(isa: Isa) -> None:
    x = random_rows(40, 16)
    assert torch.equal(simulated(abi.Simulation.AS_COMPUTED, x, 4, isa), x)
