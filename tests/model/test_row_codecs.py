"""Quantized rows: what is stored is what the formats say, and what is read back is exact."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from server.cache.arena import POISON_BYTE, Arena
from server.cache.layout import ArenaLayout
from server.cache.row_formats import Fp8IndexRow, Fp8KvRow, Mxfp4IndexRow
from server.cache.specs import CacheGeometry, LayoutError
from server.model.config import load_config
from server.model.pools import Pools
from server.model.quantization import fp4_simulated, fp8_simulated
from server.model.row_codecs import Fp8IndexRows, Fp8KvRows, Mxfp4IndexRows, RowCodec
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED

DTYPES = (torch.float32, torch.bfloat16)
KV_WIDTHS = ((448, 64), (24, 8), (0, 8), (96, 2), (7, 2))
INDEX_WIDTHS = (128, 16, 6)


def random_rows(n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different magnitudes; one of them is zero."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(n, width, generator=generator) * torch.logspace(-9, 6, n)[:, None]
    rows[1] = 0.0
    return rows.to(dtype)


def every_codec(dtype: torch.dtype) -> list[tuple[RowCodec, int, int]]:
    """Each with the channels and the bytes of a row."""
    kv = [(Fp8KvRow(nope, rope), nope + rope) for nope, rope in KV_WIDTHS]
    mxfp4, fp8 = [Mxfp4IndexRow(width) for width in INDEX_WIDTHS], [Fp8IndexRow(width) for width in INDEX_WIDTHS]
    return [
        *((Fp8KvRows(row, dtype), width, row.nbytes) for row, width in kv),
        *((Mxfp4IndexRows(row, dtype), row.width, row.nbytes) for row in mxfp4),
        *((Fp8IndexRows(row, dtype), row.width, row.nbytes) for row in fp8),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nope", "rope"), KV_WIDTHS)
def test_a_kv_row_is_the_simulated_row(nope: int, rope: int, dtype: torch.dtype) -> None:
    row = Fp8KvRow(nope, rope)
    codec, values = Fp8KvRows(row, dtype), random_rows(40, nope + rope, dtype)
    found = codec.decode(codec.encode(values))
    assert torch.equal(found[:, :nope], fp8_simulated(values[:, :nope], row.block))
    assert torch.equal(found[:, nope:], values[:, nope:].to(torch.bfloat16).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", INDEX_WIDTHS)
def test_an_mxfp4_key_is_the_simulated_key(width: int, dtype: torch.dtype) -> None:
    row = Mxfp4IndexRow(width)
    codec, values = Mxfp4IndexRows(row, dtype), random_rows(40, width, dtype)
    assert torch.equal(codec.decode(codec.encode(values)), fp4_simulated(values, row.block))


def test_an_fp8_key_has_one_scale_that_brings_its_largest_channel_to_448() -> None:
    codec = Fp8IndexRows(Fp8IndexRow(4), torch.float32)
    stored = codec.encode(torch.tensor([[3.0, -1.5, 0.0, 0.375], [0.0, 1e-6, 0.0, 0.0]]))
    assert stored[:, :4].tolist() == [[0x7E, 0xF6, 0x00, 0x66], [0, 0x49, 0, 0]]
    assert torch.equal(stored[:, 4:].contiguous().view(torch.float32).flatten(), torch.tensor([3.0, 1e-4]) / 448)
    assert codec.decode(stored)[0].tolist() == pytest.approx([3.0, -1.5, 0.0, 0.375])


def test_the_bytes_of_a_kv_row() -> None:
    """Two blocks of 64: scales 2^0 and 2^-1, and rope channels of 1.0 and -2.0."""
    values = torch.zeros(130)
    values[0], values[1], values[64], values[128], values[129] = 448.0, -1.0, 150.0, 1.0, -2.0
    stored = Fp8KvRows(Fp8KvRow(128, 2), torch.float32).encode(values).tolist()
    assert len(stored) == 136
    assert (stored[0], stored[1], stored[64]) == (0x7E, 0xB8, 0x79)  # 448, -1, 288 (150 / 2^-1 is 300: 288 is nearest)
    assert stored[128:136] == [0x80, 0x3F, 0x00, 0xC0, 127, 126, 0, 0]


def test_the_bytes_of_an_mxfp4_key() -> None:
    """The earlier channel is the low nibble; the scale is 2^1."""
    values = torch.tensor([12.0, -2.0, 5.0, 0.0] + [0.0] * 12)
    assert Mxfp4IndexRows(Mxfp4IndexRow(16), torch.float32).encode(values).tolist() == [
        0xA7, 0x04, 0, 0, 0, 0, 0, 0, 128,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_read_back_is_stored_without_loss(dtype: torch.dtype) -> None:
    """So rows that ``official`` numerics have rounded already keep their values."""
    for codec, width, nbytes in every_codec(dtype):
        stored = codec.encode(random_rows(40, width, dtype))
        assert (stored.dtype, stored.shape) == (torch.uint8, (40, nbytes))
        values = codec.decode(stored)
        if not isinstance(codec, Fp8IndexRows) or dtype is torch.float32:
            assert torch.equal(codec.decode(codec.encode(values)), values), codec


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_bytes_are_zero_and_poison_is_nan(dtype: torch.dtype) -> None:
    for codec, width, nbytes in every_codec(dtype):
        zeros = codec.decode(torch.zeros(2, nbytes, dtype=torch.uint8))
        assert (zeros.shape, zeros.dtype, zeros.any().item()) == ((2, width), dtype, False)
        assert codec.decode(torch.full((2, nbytes), POISON_BYTE, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_does_not_become_finite(wrong: float) -> None:
    """Else a broken forward would go on with plausible numbers."""
    for codec, width, _ in every_codec(torch.float32):
        for channel in {0, width // 2, width - 1}:
            values = random_rows(3, width, torch.float32)
            values[2, channel] = wrong
            found = codec.decode(codec.encode(values))
            assert not found[2, channel].isfinite(), (codec, channel)
            assert found[:2].isfinite().all()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    for codec, width, _ in every_codec(torch.bfloat16):
        values = random_rows(37, width, torch.bfloat16)
        whole = codec.encode(values)
        for start, stop in pairwise((0, 1, 4, 36, 37)):
            assert torch.equal(codec.encode(values[start:stop]), whole[start:stop])
            assert torch.equal(codec.decode(whole[start:stop]), codec.decode(whole)[start:stop])


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    config = load_config(BUNDLED)
    components = tuple(
        type(spec)(**{**vars(spec), "width": 56}) if spec.name == "swa" else spec
        for spec in state_components(config, "float32", kv_dtype="fp8")
    )
    arena = Arena(ArenaLayout.from_geometry(CacheGeometry(256, 2, 2, 64, 0, components)))
    with pytest.raises(LayoutError, match="swa has fp8_kv rows of 56 bytes, the model's have 48"):
        Pools(arena, config, torch.float32)
