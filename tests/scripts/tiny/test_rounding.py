"""Training with the roundings of `--numerics official`: the served function forward, as if unrounded backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import attention, rounding
from tiny.checkpoint import export_checkpoint
from tiny.curriculum import STAGES
from tiny.loop import OtherRecipe
from tiny.model import IndexerMode
from tiny.tokenizer import build_tokenizer
from tiny.training import Stage, Trainer

from server.cache.layout import Placement
from server.model.loader import load_model
from server.model.numerics import OFFICIAL, PLAIN, Numerics
from server.model.quantization import hadamard
from tests.support.runners import make_runner, prefill, prompt

TOKENIZER = build_tokenizer()
N_TOKENS = 256
SELECTING = Stage(
    "selecting",
    n_steps=3,
    n_tokens=N_TOKENS,
    n_documents=2,
    mixture={"price_quiz": 1.0, "few_shot": 1.0},
    modes={IndexerMode.TEACH: 1.0},
)
WITHIN, MOST = 1e-4, 0.9
"""Logits that agree, relative to the largest; and the share of rows that do. In the others a value lies so close to a
tie of a rounding that sums in fp32 decide.
"""


def trained(folder: Path, rounded: float) -> Trainer:
    run = Trainer(TOKENIZER, [replace(SELECTING, rounded=rounded)], 0, folder)
    run.run()
    return run


def test_rows_are_the_servers_and_gradients_pass_through() -> None:
    torch.manual_seed(0)
    rows = torch.randn(2, 1, 5, 32, requires_grad=True)
    above = torch.randn(rows.shape)
    out = rounding.kv_rows(rows, 8)
    out.backward(above)
    assert torch.equal(out, OFFICIAL.kv_rows(rows.detach(), 8))
    assert not torch.equal(out, rows)
    assert rows.grad is not None
    assert torch.equal(rows.grad, above)


def test_index_rows_are_the_servers_and_have_the_gradient_of_the_transform() -> None:
    torch.manual_seed(0)
    rows, plain = (torch.randn(2, 5, 4, 16).requires_grad_() for _ in range(2))
    above = torch.randn(rows.shape)
    out = rounding.index_rows(rows)
    out.backward(above)
    hadamard(plain).backward(above)
    assert torch.equal(out, OFFICIAL.index_rows(rows.detach()))
    assert rows.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(rows.grad, plain.grad)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return trained(tmp_path_factory.mktemp("rounded"), rounded=1.0)


@pytest.mark.parametrize(("numerics", "other"), [(OFFICIAL, PLAIN), (PLAIN, OFFICIAL)])
def test_the_trained_function_is_the_served_one(
    run: Trainer, tmp_path: Path, numerics: Numerics, other: Numerics
) -> None:
    export_checkpoint(run.model, tmp_path / "tiny")
    served = load_model(tmp_path / "tiny", numerics=numerics)
    ids = prompt(N_TOKENS, served)
    expected = prefill(make_runner(served), ids, Placement(0, (0,)), N_TOKENS)

    run.controls.hide_over(torch.zeros(1, N_TOKENS, dtype=torch.bool))

    def agreeing(rounds: Numerics) -> float:
        run.controls.set_up(64, 128, IndexerMode.SELECT, rounded=rounds is OFFICIAL)
        with torch.no_grad():
            ours = attention.banded_logits(run.model, torch.tensor([ids]))[0]
        errors = (ours - expected).abs().amax(-1) / expected.abs().amax(-1)
        return float((errors < WITHIN).float().mean())

    assert agreeing(numerics) >= MOST
    assert agreeing(other) < 0.1


def test_rounded_and_plain_steps_are_mixed_and_differ(run: Trainer, tmp_path: Path) -> None:
    half = replace(SELECTING, n_steps=40, rounded=0.5)
    flags = [run.plan(half, step).rounded for step in range(40)]
    assert 10 < sum(flags) < 30
    plain = trained(tmp_path, rounded=0.0)
    assert "rounded" in run.curve[-1]
    assert "rounded" not in plain.curve[-1]
    assert run.curve[-1]["lesson"] != plain.curve[-1]["lesson"]


def test_roundings_belong_to_the_recipe_and_plain_stages_read_as_before(tmp_path: Path) -> None:
    assert str(SELECTING) == repr(SELECTING)
    assert "rounded" not in repr(SELECTING)  # runs older than the field can go on
    trained(tmp_path, rounded=0.0)
    with pytest.raises(OtherRecipe):
        Trainer(TOKENIZER, [replace(SELECTING, rounded=0.5)], 0, tmp_path).resume()


def test_stages_that_select_learn_both() -> None:
    assert [stage.rounded for stage in STAGES] == [
        0.5 if IndexerMode.SELECT in stage.modes else 0.0 for stage in STAGES
    ]
