"""The whole network with official numerics and quantized rows: as near to the Python model as roundings allow, and the
same bits however its rows are computed.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from server.cache.layout import Placement
from server.engine.runner import ModelRunner
from server.kernels.model import PackedModel
from server.model.batch import Segment
from server.model.interface import LoadedModel
from server.model.numerics import OFFICIAL
from tests.kernels.test_quantized_attention import Kind, every_kind
from tests.support.checkpoints import BUNDLED
from tests.support.models import load
from tests.support.runners import make_runner, prefill, prompt

FP32 = torch.float32
N = 300
PLACE, ELSEWHERE = Placement(3, (7, 2)), Placement(5, (9, 4))


@lru_cache
def model(kernels: str, kind: Kind, dtype: torch.dtype) -> LoadedModel:
    return load(BUNDLED, kernels, draft=True, numerics=kind[0], dtype=dtype)


def runner(
    kernels: str, kind: Kind, *, dtype: torch.dtype = FP32, threads: int = 1, spec_tokens: int = 0
) -> ModelRunner:
    _, kv_dtype, index_dtype = kind
    return make_runner(
        model(kernels, kind, dtype),
        threads=threads,
        spec_tokens=spec_tokens,
        kv_dtype=kv_dtype,
        index_dtype=index_dtype,
    )


def far(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """How far each row is from the other's, against its largest value."""
    ours, theirs = ours.float().flatten(1), theirs.float().flatten(1)
    return (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)


def live_bytes(runner: ModelRunner, n: int, place: Placement) -> dict[str, bytes]:
    runs = runner.arena.layout.live_runs(n, place)
    return {name: runner.arena.read(part) for name, part in runs.items() if name not in ("handoff", "draft_swa")}


@every_kind
def test_logits_and_drafts_are_near_those_of_the_python_model(kind: Kind) -> None:
    """A code that falls otherwise reaches later rows, by little; a rounding left out moves them all by a hundredth."""
    text = prompt(N, model("cpu", kind, FP32))
    python, kernels = (runner(each, kind) for each in ("python", "cpu"))
    theirs, ours = (prefill(each, text, PLACE, 128) for each in (python, kernels))
    assert far(ours, theirs).median() < 1e-5
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.95

    streams = python.forward([Segment(text, 0, ELSEWHERE)], every_row=True).streams
    drafts = [each.draft([Segment([*text[1:], 9], 0, ELSEWHERE)], streams).streams for each in (python, kernels)]
    assert far(drafts[1], drafts[0]).median() < 1e-5


@pytest.mark.parametrize("name", ["e_proj", "h_proj"])
def test_a_draft_that_does_not_round_its_inputs_is_seen(name: str) -> None:
    """What the test above would say."""
    packed, place = load(BUNDLED, "cpu", draft=True, numerics=OFFICIAL), Placement(1, (1, 2))
    assert isinstance(packed, PackedModel)
    assert packed.weights.draft is not None
    text = prompt(40, packed)
    streams = make_runner(packed).forward([Segment(text, 0, place)], every_row=True).streams
    shifted = [Segment([*text[1:], 9], 0, place)]
    rounded = make_runner(packed).draft(shifted, streams).streams
    getattr(packed.weights.draft, name).quantized_input = 0
    assert far(make_runner(packed).draft(shifted, streams).streams, rounded).median() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_chunks_threads_and_rings_change_no_bit(kind: Kind, dtype: torch.dtype) -> None:
    text = prompt(N, model("cpu", kind, dtype))
    whole = runner("cpu", kind, dtype=dtype)
    parts = runner("cpu", kind, dtype=dtype, threads=2, spec_tokens=3)
    expected, found = prefill(whole, text, PLACE, 1024), prefill(parts, text, ELSEWHERE, 50)
    assert expected.isfinite().all()
    assert torch.equal(found, expected)
    assert live_bytes(parts, N, ELSEWHERE) == live_bytes(whole, N, PLACE)


@every_kind
def test_single_tokens_beside_others_make_the_bits_of_a_chunk(kind: Kind) -> None:
    text = prompt(140, model("cpu", kind, FP32))
    expected = prefill(runner("cpu", kind), text, PLACE, 256)
    busy = runner("cpu", kind)
    other = prompt(80, model("cpu", kind, FP32), seed=1)
    prefill(busy, text[:60], PLACE, 60)
    for i in range(60, len(text)):
        beside = Segment(other[i - 60 : i - 59], i - 60, ELSEWHERE)
        logits = busy.forward([beside, Segment(text[i : i + 1], i, PLACE)]).logits
        assert torch.equal(logits[1], expected[i]), f"position {i}"
