"""A training goes on where it was stopped, with the same bits, and only along the steps that it has taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny.loop import OtherRecipe
from tiny.model import IndexerMode
from tiny.tokenizer import build_tokenizer
from tiny.training import Stage, Trainer

TOKENIZER = build_tokenizer()
ALL_MODES = {IndexerMode.DENSE: 1.0, IndexerMode.TEACH: 1.0, IndexerMode.SELECT: 1.0}
FIRST = Stage(
    "near",
    n_steps=4,
    n_tokens=64,
    n_documents=2,
    mixture={"price_quiz": 1.0, "weight_quiz": 1.0},
    window=16,
    heavy_rate=16,
)
SECOND = Stage(
    "far",
    n_steps=4,
    n_tokens=256,
    n_documents=2,
    mixture={"chat": 1.0, "tools": 1.0, "few_shot": 1.0},
    modes=ALL_MODES,
    last_lr=1e-4,
)


def trainer(folder: Path, *stages: Stage, seed: int = 0) -> Trainer:
    return Trainer(TOKENIZER, stages, seed, folder)


def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", FIRST, SECOND)
    whole.run()
    for until in (3, 6):  # in the middle of either stage
        stopped = trainer(tmp_path / "parts", FIRST, SECOND)
        stopped.resume()
        stopped.run(until)
    last = trainer(tmp_path / "parts", FIRST, SECOND)
    assert last.resume()
    assert last.step == 6
    last.run()
    state = last.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.model.state_dict().items())


def test_training_changes_every_tensor_that_can_learn(tmp_path: Path) -> None:
    run = trainer(tmp_path, FIRST, replace(SECOND, modes={IndexerMode.TEACH: 1.0}))
    before = {name: tensor.clone() for name, tensor in run.model.named_parameters()}
    run.run()
    unchanged = [name for name, tensor in run.model.named_parameters() if torch.equal(before[name], tensor)]
    assert unchanged == []


def test_stages_to_come_may_change(tmp_path: Path) -> None:
    trainer(tmp_path, FIRST).run()
    assert trainer(tmp_path, FIRST, SECOND).resume()


@pytest.mark.parametrize(
    ("stages", "seed"),
    [
        ((replace(FIRST, lr=1e-3), SECOND), 0),
        ((replace(FIRST, mixture={"soup": 1.0}), SECOND), 0),
        ((FIRST, SECOND), 1),
    ],
)
def test_the_state_of_another_run_is_refused(tmp_path: Path, stages: tuple[Stage, ...], seed: int) -> None:
    trainer(tmp_path, FIRST, SECOND).run(until=2)
    with pytest.raises(OtherRecipe, match="name another folder"):
        trainer(tmp_path, *stages, seed=seed).resume()


def test_tokens_of_one_meaning_start_alike(tmp_path: Path) -> None:
    weight = trainer(tmp_path, FIRST).model.model.embed_tokens.weight.detach()

    def likeness(a: str, b: str) -> float:
        (first,), (second,) = (TOKENIZER.encode(text, add_special_tokens=False) for text in (a, b))
        return float(torch.cosine_similarity(weight[first], weight[second], dim=0))

    assert likeness(" rice", "rice") > 0.6
    assert likeness(" 47", "47") > 0.6
    assert likeness(" 47", " 147") > likeness(" 47", " 136") + 0.2
    assert abs(likeness(" rice", " milk")) < 0.4


def test_the_learning_rate_warms_up_holds_and_falls_within_its_stage(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(FIRST, n_steps=100), replace(SECOND, n_steps=100, lr=1e-3, last_lr=1e-4))
    rates = []
    for step in (0, 99, 100, 150, 199):
        run.step = step
        rates.append(run.learning_rate())
    assert rates[0] < rates[1] == 3e-3
    assert rates[2] == pytest.approx(1e-3)
    assert rates[3] == pytest.approx(5.5e-4)
    assert rates[4] == pytest.approx(1e-4, rel=0.01)
