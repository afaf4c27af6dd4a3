"""Each point where ``official`` rounds, against values worked out by hand; ``test_official.py`` has whole layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from server.model.config import CheckpointError
from server.model.layers import Linear
from server.model.loader import check_tensors, load_model
from server.model.numerics import NUMERICS, OFFICIAL, PLAIN, Numerics, NumericsLayer
from tests.support.checkpoints import write_checkpoint
from tests.support.quantized import quantized_weights, take_for_quantized

BF16, FP32 = torch.bfloat16, torch.float32


def random_rows(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# --- linear inputs ----------------------------------------------------------------------------------------------------


def test_inputs_are_quantized_before_weights_that_are_stored_quantized() -> None:
    x = random_rows(3, 40)
    for stored_as, changes in (("fp8", True), ("fp4", True), ("", False)):
        assert torch.equal(OFFICIAL.linear_input(x, stored_as), x) != changes
        assert torch.equal(PLAIN.linear_input(x, stored_as), x)


def test_every_row_has_a_scale_for_128_channels_and_one_for_what_is_left() -> None:
    x = torch.full((2, 130), 2.0**-10)
    x[0, 0] = 448
    out = OFFICIAL.linear_input(x, "fp8")
    assert out[0, 0] == 448
    assert out[0, 1:128].eq(0).all(), "scale 1: halfway between 0 and the smallest number"
    assert torch.equal(out[0, 128:], x[0, 128:])
    assert torch.equal(out[1], x[1])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.0, 0.0),
        (-0.0, -0.0),
        (448.0, 448.0),
        (-448.0, -448.0),
        (452.0, 448.0),  # scale 2: 226, between 224 and 240
        (464.0, 448.0),  # scale 2: 232 is halfway between 224 and 240, whose code is odd
        (17 * 2.0**-18, 2.0**-14),  # scale 2^-22: 272 is halfway between 256 and 288, whose code is odd
        (2.0**-32, 0.0),  # scale 2^-22: 2^-10 is halfway to the smallest number, 0 is even
        (1.5 * 2.0**-31, 2.0**-30),  # halfway between 2^-9 and 2^-8 times the scale
        (1.0, 1.0),
        (2.0**100, 2.0**100),
        (math.inf, math.nan),
        (-math.inf, math.nan),
        (math.nan, math.nan),
    ],
)
def test_one_value_alone_in_its_block(value: float, rounded: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[value]], dtype=dtype)
    out = OFFICIAL.linear_input(x, "fp8")
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.tensor([[rounded]]).double(), rtol=0, atol=0, equal_nan=True)
    assert out.signbit().item() == x.signbit().item() or math.isnan(rounded)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rotated_channels_of_a_row_stay() -> None:
    row = torch.tensor([[448.0, 17.0] + [2.0**-10] * 126 + [1.1, 17.3]])  # two blocks of 64, then 2 rotated
    out = OFFICIAL.kv_rows(row, 2)
    assert out[0, :64].tolist() == [448, 16] + [0] * 62
    assert torch.equal(out[:, 64:128], row[:, 64:128])
    assert torch.equal(out[:, 128:], row[:, 128:])
    assert torch.equal(PLAIN.kv_rows(row, 2), row)


def test_a_row_whose_channels_all_rotate_stays() -> None:
    row = random_rows(3, 16)
    assert torch.equal(OFFICIAL.kv_rows(row, 16), row)


def test_a_bad_number_spoils_its_block_alone() -> None:
    row = torch.ones(2, 140)
    row[0, 70] = math.nan
    out = OFFICIAL.kv_rows(row, 12)
    assert out[0].isnan().tolist() == [False] * 64 + [True] * 64 + [False] * 12
    assert out[1].eq(1).all()


@pytest.mark.parametrize(
    ("row", "stored"),
    [
        ([4.0, 0, 0, 0], [2.0, 2, 2, 2]),
        ([6.0, 2, 0, 0], [4.0, 2, 4, 2]),
        ([5.0, 0, 0, 0], [2.0, 2, 2, 2]),  # 2.5 with scale 1/2 is halfway between 4 and 6, 4 has the even code
        ([0.0, 0, 0, 0], [0.0, 0, 0, 0]),
        ([0.0, 12, 0, 0], [6.0, -6, 6, -6]),
        ([1.0, 1, 1, 1], [2.0, 0, 0, 0]),
        ([2.0**-126, 0, 0, 0], [2.0**-127] * 4),  # scale 2^-126: the smallest number is half of it
    ],
)
def test_index_rows_are_transformed_then_quantized(row: list[float], stored: list[float]) -> None:
    assert OFFICIAL.index_rows(torch.tensor([row])).tolist() == [stored]
    assert PLAIN.index_rows(torch.tensor([row])).tolist() == [row]


def test_index_rows_share_scales_by_32_channels() -> None:
    rows = random_rows(5, 3, 128)
    transformed = rows @ sylvester(128) / 128**0.5
    expected = torch.cat(
        [OFFICIAL.index_rows(part @ sylvester(32) / 32**0.5) for part in transformed.split(32, -1)], -1
    )
    assert (OFFICIAL.index_rows(rows) != expected).float().mean() < 0.01, "the matrix is its own inverse"


def sylvester(n: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


# --- bf16 where the reference computes in bf16 ------------------------------------------------------------------------


def in_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(BF16).double()


def test_heads_are_normed_in_the_dtype_of_the_queries() -> None:
    q = random_rows(7, 3, 24, dtype=BF16)
    mean = in_bf16(in_bf16(q.double() ** 2).mean(-1, keepdim=True))
    stepwise = in_bf16(q.double() * in_bf16(in_bf16(mean + 1e-6) ** -0.5))
    assert torch.equal(OFFICIAL.unit_heads(q, 1e-6).double(), stepwise)
    assert not torch.equal(PLAIN.unit_heads(q, 1e-6).double(), stepwise)
    torch.testing.assert_close(OFFICIAL.unit_heads(q.float(), 1e-6), PLAIN.unit_heads(q.float(), 1e-6))


def test_index_scores_are_summed_and_rounded() -> None:
    dots = torch.tensor([[[256.0, -3.0], [1.0, 1.0]]], dtype=BF16)  # two heads, two entries
    weights = torch.tensor([[1.0, 1.0]])
    assert OFFICIAL.index_scores(dots, weights[None].to(BF16), 16).tolist() == [[[256, 1]]], "257 is no number in bf16"
    assert PLAIN.index_scores(dots, weights[None], 16).tolist() == [[[257, 1]]]
    assert OFFICIAL.index_scores(dots.float(), weights[None], 16).tolist() == [[[257, 1]]]


def test_products_with_an_index_weight_are_rounded_one_by_one() -> None:
    dots, weight = torch.tensor([[[1.0078125], [1.0078125]]], dtype=BF16), 1.0078125
    weights = torch.tensor([[[weight, weight]]], dtype=BF16)
    assert OFFICIAL.index_scores(dots, weights, 0).item() == 2 * 1.015625, "twice 1.01568603515625, rounded down"


def test_index_weights_are_rounded() -> None:
    projected = torch.tensor([[1.0078125]], dtype=BF16)
    assert OFFICIAL.index_weights(projected, 1.0078125).item() == 1.015625
    assert PLAIN.index_weights(projected, 1.0078125).item() == pytest.approx(1.01568603515625, abs=0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_attention_multiplies_in_fp32(dtype: torch.dtype) -> None:
    x = random_rows(3, 8, dtype=dtype)
    assert OFFICIAL.attention_factor(x).dtype == FP32
    assert PLAIN.attention_factor(x).dtype == dtype


# --- whole networks ---------------------------------------------------------------------------------------------------

WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear_input": lambda x: OFFICIAL.linear_input(x, "fp8"),
    "kv_rows": lambda x: OFFICIAL.kv_rows(x, 6),
    "index_rows": lambda x: OFFICIAL.index_rows(x[:, :64]),
    "unit_heads": lambda x: OFFICIAL.unit_heads(x.view(len(x), 3, 50), 1e-6),
    "index_scores": lambda x: OFFICIAL.index_scores(x[:, :144].view(-1, 9, 16), x[:, :9].unsqueeze(1).contiguous(), 16),
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", WHOLE)
def test_a_row_is_the_same_bits_alone_and_among_others(name: str, dtype: torch.dtype) -> None:
    rows = random_rows(600, 150, dtype=dtype) * torch.logspace(-5, 3, 600)[:, None].to(dtype)
    function, start = WHOLE[name], 0
    whole = function(rows)
    for i in range(1, 60):
        assert torch.equal(function(rows[start : start + i % 17 + 1].clone()), whole[start : start + i % 17 + 1])
        start += i % 17 + 1


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_all_layers_of_a_network_have_the_same(tmp_path: Path, numerics: Numerics) -> None:
    write_checkpoint(tmp_path, draft=True)
    model = load_model(tmp_path, draft=True, numerics=numerics)
    layers = [module for module in model.modules() if isinstance(module, NumericsLayer)]
    assert len(layers) > 50
    assert model.numerics is numerics
    assert all(layer.numerics is numerics for layer in layers)


def test_what_the_reference_quantizes_is_taken_for_quantized(tmp_path: Path) -> None:
    """Of attention, experts and draft; neither compressors, nor what only weighs or chooses."""
    write_checkpoint(tmp_path, draft=True)
    model = take_for_quantized(load_model(tmp_path, draft=True))
    named = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, Linear)}
    quantized = {key.removesuffix(".weight").rpartition(".")[2] for key in quantized_weights(model.config, draft=True)}
    assert named - quantized == {"wgate", "weights_proj", "head"}
    compressors = [name for name, layer in model.named_modules() if isinstance(layer, Linear) and "compressor" in name]
    assert all(not layer.quantized for name, layer in model.named_modules() if name in compressors)


def test_another_width_than_a_power_of_two_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "csa", index_head_dim=18)
    for load in (load_model, check_tensors):
        load(tmp_path / "csa")
        with pytest.raises(CheckpointError, match="index_head_dim is 18; --numerics official needs a power of two"):
            load(tmp_path / "csa", numerics=OFFICIAL)
    write_checkpoint(tmp_path / "hca", index_head_dim=18, compress_ratios=[0, 128, 128, 0, 128, 0])
    load_model(tmp_path / "hca", numerics=OFFICIAL)
