"""``--numerics official`` on a quantized checkpoint, against the official forward written down once more
(``plain_official.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from server.cache.arena import TORCH_DTYPES
from server.cache.layout import Placement
from server.cache.live import LIVE_RULES
from server.cache.row_formats import index_block, kv_block
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.loader import load_model
from server.model.network import DeepseekV4
from server.model.numerics import OFFICIAL
from server.model.quantization import fp4_codes, fp8_codes
from tests.model.plain_official import ROUNDINGS, PlainOfficial, Rows
from tests.support.quantized_checkpoints import Made, make_quantized
from tests.support.runners import make_runner, prompt

SHAPE: dict[str, Any] = {
    "hidden_size": 160,  # activations in blocks of 128 and 32 channels
    "head_dim": 104,  # 96 channels without rotation: blocks of 32
    "index_head_dim": 64,
    "moe_intermediate_size": 144,
    "n_routed_experts": 4,
    "index_topk": 8,  # most queries must choose
    "sliding_window": 48,
}
N = 190
PLACE = Placement(2, (3, 1))
WITHIN = 1e-5
"""Largest error of a row that agrees, relative to its largest value: that of sums in fp32."""
FEW = 0.002
"""Share of codes that may differ: of values that lie so close to a tie that sums in fp32 decide."""
FEW_ROWS = 0.1
"""Share of rows that may differ: those with such a value on the way, and those that read them."""


@dataclass(frozen=True)
class Run:
    """What a node computed of one text: streams before and after every layer, and the rows that it stored."""

    model: DeepseekV4
    ids: list[int]
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    rows: Rows
    drafted: torch.Tensor

    def differing_codes(self, expected: Rows) -> dict[tuple[str, int], float]:
        """The share of codes, by component and layer, of the rows that are still stored."""
        shares = {}
        for (name, layer), rows in expected.items():
            live = LIVE_RULES[name](N, self.model.config.sliding_window)
            ours, theirs = (
                codes_of(name, part, self.model.config.rope_dim)
                for part in (self.rows[name, layer], rows[live.start : live.stop].float())
            )
            shares[name, layer] = float((ours != theirs).float().mean())
        return shares


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_quantized(tmp_path_factory.mktemp("official"), seed=11, **SHAPE)


@pytest.fixture(scope="module")
def run(made: Made) -> Run:
    model = load_model(made.path, draft=True, numerics=OFFICIAL)
    before, after = list[torch.Tensor](), list[torch.Tensor]()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: before.append(args[0][:N]))
        layer.register_forward_hook(lambda _, args, output: after.append(output[:N]))
    ids, runner = prompt(N + 1, model), make_runner(model)
    streams = runner.forward([Segment(ids[:N], 0, PLACE)]).streams
    drafted = runner.draft([Segment(ids[1:], 0, PLACE)], streams).streams
    return Run(model, ids, before, after, stored_rows(runner, N), drafted)


def stored_rows(runner: ModelRunner, n: int) -> Rows:
    """Every live row after ``n`` tokens, by component and layer."""
    layout, found = runner.arena.layout, Rows()
    for name, runs in layout.live_runs(n, PLACE).items():
        component = layout.component(name)
        if component.layer_ids and runs:
            flat = torch.frombuffer(bytearray(runner.arena.read(runs)), dtype=TORCH_DTYPES[component.dtype])
            rows = flat.view(-1, len(component.layer_ids), component.width)
            found |= {(name, layer): rows[:, i] for i, layer in enumerate(component.layer_ids)}
    return found


def codes_of(name: str, rows: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """The quantized channels of ``rows`` as their codes."""
    if name == "c4_index":
        return fp4_codes(rows, index_block(rows.shape[-1]))[0]
    nope = rows[:, : rows.shape[-1] - rope_dim]
    return fp8_codes(nope, kv_block(nope.shape[-1]))[0].view(torch.uint8)


@pytest.fixture(scope="module")
def plain_official(made: Made) -> Callable[..., PlainOfficial]:
    quantized = {key for key in made.stored if key.removesuffix("weight") + "scale" in made.stored}

    def make(*without: str) -> PlainOfficial:
        return PlainOfficial(made.numbers, made.config, quantized, frozenset(without))

    return make


def differing(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of rows that do not agree."""
    ours, expected = ours.double().flatten(1), expected.flatten(1)
    error = (ours - expected).abs().amax(-1) / expected.abs().amax(-1)
    return float((error > WITHIN).double().mean())


def differing_behind(layer: int, run: Run, oracle: PlainOfficial) -> float:
    """Rows of the streams behind ``layer``, given the node's streams before it: so no layer hides what another does."""
    ratio = run.model.config.compress_ratios[layer]
    out = oracle.block(f"layers.{layer}", layer, ratio, run.before[layer].double(), run.ids[:N])
    return differing(run.after[layer], out)


@pytest.mark.parametrize("layer", range(5))
def test_every_layer_and_its_rows_agree(run: Run, plain_official: Callable[..., PlainOfficial], layer: int) -> None:
    oracle = plain_official()
    assert differing_behind(layer, run, oracle) < FEW_ROWS
    assert ("swa", layer) in oracle.rows
    assert max(run.differing_codes(oracle.rows).values()) < FEW


def test_the_draft_agrees(run: Run, plain_official: Callable[..., PlainOfficial]) -> None:
    oracle = plain_official()
    expected = oracle.draft(run.after[-1], run.ids[1:])
    assert differing(run.drafted, expected) < FEW_ROWS
    assert oracle.rows.keys() == {("draft_swa", 5)}
    assert max(run.differing_codes(oracle.rows).values()) < FEW


LEFT_OUT = {
    "linear inputs": (0, 1, 2),
    "expert inputs": (0, 4),
    "window rows": (0, 1, 2),
    "entries": (1, 2),
    "index keys": (1,),
    "index queries": (1,),
    "transform of keys and queries": (1,),
}
"""By rounding: layers that show it (window only, CSA, HCA; chosen by hash, by score)."""


def test_every_rounding_is_left_out_once() -> None:
    assert LEFT_OUT.keys() == set(ROUNDINGS)


@pytest.mark.parametrize(
    ("rounding", "layer"), [(name, layer) for name, layers in LEFT_OUT.items() for layer in layers]
)
def test_a_rounding_that_is_left_out_shows(
    run: Run, plain_official: Callable[..., PlainOfficial], rounding: str, layer: int
) -> None:
    """So the agreement above is not for want of a difference."""
    assert differing_behind(layer, run, plain_official(rounding)) > 2 * FEW_ROWS


@pytest.mark.parametrize("rounding", ["linear inputs", "expert inputs", "window rows"])
def test_a_rounding_that_is_left_out_of_the_draft_shows(
    run: Run, plain_official: Callable[..., PlainOfficial], rounding: str
) -> None:
    expected = plain_official(rounding).draft(run.after[-1], run.ids[1:])
    assert differing(run.drafted, expected) > 2 * FEW_ROWS
