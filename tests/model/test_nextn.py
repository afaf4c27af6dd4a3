"""The NextN layer against an independent plain implementation, and its window state across chunks and hand-over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from server.cache.layout import Placement
from server.cache.live import LIVE_RULES
from server.model.batch import Segment
from server.model.checkpoint import has_draft
from server.model.config import CheckpointError
from server.model.interface import LoadedModel
from server.model.loader import load_model
from tests.model.plain_nextn import plain_nextn
from tests.support.checkpoints import tensors_of, write_checkpoint
from tests.support.models import BOTH, load
from tests.support.runners import make_runner, prompt

N = 90
PLACE = Placement(2, (3, 1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    write_checkpoint(path, seed=5, draft=True)
    return path


@pytest.fixture(scope="module", params=BOTH)
def model(checkpoint: Path, request: pytest.FixtureRequest) -> LoadedModel:
    return load(checkpoint, request.param, draft=True)


def test_agrees_with_the_plain_layer_at_every_position(model: LoadedModel, checkpoint: Path) -> None:
    ids, runner = prompt(N + 8, model), make_runner(model)
    streams = runner.forward([Segment(ids[:N], 0, PLACE)]).streams
    expected_streams, expected = plain_nextn(tensors_of(checkpoint), streams, ids[1 : N + 1], model.config)
    for t in range(N):  # one row at a time, through the ring
        out = runner.draft([Segment(ids[t + 1 : t + 2], t, PLACE)], streams[t : t + 1])
        assert (out.logits[0] - expected[t]).abs().max() < 1e-4 * expected[t].abs().max(), f"position {t}"
        assert (out.streams[0] - expected_streams[t]).abs().max() < 1e-4 * expected_streams[t].abs().max()


def test_a_segment_of_several_rows_equals_single_rows(model: LoadedModel) -> None:
    ids, runner, other = prompt(N + 8, model), make_runner(model), make_runner(model, spec_tokens=5)
    streams = runner.forward([Segment(ids[:N], 0, PLACE)]).streams
    for t in range(N):
        single = runner.draft([Segment([ids[t + 1]], t, PLACE)], streams[t : t + 1]).logits[0]
    whole = other.draft([Segment(ids[1 : N + 1], 0, PLACE)], streams).logits[0]
    assert torch.equal(single, whole)


def test_prompt_rows_need_no_attention_and_only_the_last_window(model: LoadedModel) -> None:
    """Rows written without attention, only the live ones, leave the next draft step the same bits as a full pass."""
    ids = prompt(N + 8, model)
    full, sparse = make_runner(model), make_runner(model, poison=True)
    streams = full.forward([Segment(ids[:N], 0, PLACE)]).streams
    full.draft([Segment(ids[1:N], 0, PLACE)], streams[: N - 1])
    live = LIVE_RULES["draft_swa"](N, model.config.sliding_window)
    assert len(live) == model.config.sliding_window - 1
    sparse.draft_rows(
        [Segment(ids[live.start + 1 : live.stop + 1], live.start, PLACE)], streams[live.start : live.stop]
    )
    steps = [r.draft([Segment([ids[N]], N - 1, PLACE)], streams[N - 1 :]).logits for r in (full, sparse)]
    assert torch.equal(steps[0], steps[1])


def test_a_cold_start_reads_nothing_before_it(model: LoadedModel) -> None:
    ids, runner = prompt(N + 8, model), make_runner(model, poison=True)
    streams = runner.forward([Segment(ids[:N], 0, PLACE)]).streams
    cold = runner.draft([Segment([ids[N]], N - 1, PLACE, valid_from=N - 1)], streams[N - 1 :]).logits
    assert cold.isfinite().all()


def test_other_kinds_of_draft_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    write_checkpoint(bare, seed=5)
    assert not has_draft(bare)
    with pytest.raises(CheckpointError, match="has no NextN draft layer"):
        load_model(bare, draft=True)

    dspark = tmp_path / "dspark"
    write_checkpoint(dspark, seed=5)
    save_file({"mtp.0.main_proj.weight": torch.zeros(4, 4)}, dspark / "draft.safetensors")
    assert not has_draft(dspark)
    with pytest.raises(CheckpointError, match=r"mtp\.0\.main_proj\.weight shows a DSpark draft"):
        load_model(dspark, draft=True)
    load_model(dspark)

    compressed = tmp_path / "compressed"
    write_checkpoint(compressed, seed=5, draft=True, compress_ratios=[0, 4, 128, 4, 128, 4])
    with pytest.raises(CheckpointError, match="gives the draft layer ratio 4, it must be 0"):
        load_model(compressed, draft=True)
    load_model(compressed)
