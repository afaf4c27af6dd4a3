"""Training of the draft layer: the trained function is the served one, and what is written is a whole checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny.acceptance import measure
from tiny.checkpoint import write_draft
from tiny.draft_training import DraftTrainer, Settings
from tiny.nextn import Anchors, Drafter, NextN
from tiny.tokenizer import build_tokenizer

from server.model.config import load_config
from server.model.loader import load_model
from tests.model.plain_nextn import plain_nextn
from tests.support.checkpoints import BUNDLED, tensors_of, write_checkpoint

SHORT = Settings(n_lessons=2, n_exams=1, n_steps=6, n_single_steps=2, n_tokens=64, n_documents=2, n_warmup=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", vocab_size=len(build_tokenizer()))
    return tmp_path / "model"


def test_a_chain_is_the_plain_layer_fed_with_its_own_streams(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path)
    layer = NextN.beside(target, json.loads((tmp_path / "config.json").read_text()))
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.add_(0.3 * torch.randn_like(tensor))
        ids, streams = torch.randint(0, 320, (2, 50)), torch.randn(2, 50, 4, 64)
        anchors = [(0, 5), (1, 40), (1, 44)]  # the window is 32: one chain starts inside the first, two behind it
        places = Anchors(*torch.tensor(anchors).unbind(1))
        chains = Drafter(layer, target).chains(ids, streams, places, depth=4)

    tensors, config = tensors_of(tmp_path) | layer.official(), load_config(tmp_path)
    for i, (document, position) in enumerate(anchors):
        rows = streams[document, : position + 1]
        for step in range(4):
            next_ids = ids[document, 1 : position + step + 2].tolist()
            out, logits = plain_nextn(tensors, rows, next_ids, config)
            torch.testing.assert_close(chains[step][i], logits[-1], atol=1e-4, rtol=1e-4)
            rows = torch.cat([rows, out[-1:]])


def test_a_trained_draft_joins_its_target_in_one_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    backbone = tensors_of(checkpoint)
    trainer = DraftTrainer(checkpoint, build_tokenizer(), SHORT, tmp_path / "work")
    trainer.run()
    for _ in range(2):  # the second time in place of the first draft
        write_draft(checkpoint, trainer.layer, trainer.target_digest)
    assert load_model(checkpoint, draft=True).nextn is not None
    assert load_model(checkpoint).nextn is None
    assert json.loads((checkpoint / "config.json").read_text())["num_nextn_predict_layers"] == 1
    kept = tensors_of(checkpoint)
    assert all(torch.equal(kept[key], tensor) for key, tensor in backbone.items())


def test_a_run_goes_on_where_it_was_stopped(checkpoint: Path, tmp_path: Path) -> None:
    whole = DraftTrainer(checkpoint, build_tokenizer(), SHORT, tmp_path / "whole")
    whole.run()
    stopped = DraftTrainer(checkpoint, build_tokenizer(), SHORT, tmp_path / "parts")
    stopped.run(until=4)
    other = DraftTrainer(checkpoint, build_tokenizer(), SHORT, tmp_path / "parts")
    assert other.resume()
    other.run()
    for name, tensor in whole.layer.state_dict().items():
        torch.testing.assert_close(other.layer.state_dict()[name], tensor)


def test_a_draft_of_another_target_is_not_written(checkpoint: Path, tmp_path: Path) -> None:
    trainer = DraftTrainer(checkpoint, build_tokenizer(), SHORT, tmp_path / "work")
    write_checkpoint(checkpoint, seed=1, vocab_size=len(build_tokenizer()))
    with pytest.raises(ValueError, match="the target changed"):
        write_draft(checkpoint, trainer.layer, trainer.target_digest)


def test_the_bundled_draft_is_worth_its_steps() -> None:
    """The goal over all questions is 2.5 tokens a step; a few of them show that the draft fits its target."""
    result = measure(BUNDLED, k=3, n_questions=6, threads=1)
    assert result.mean_length >= 2.5
