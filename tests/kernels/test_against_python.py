"""The kernels compute what the model in Python computes: logits, streams, and every component of the state.

Both go through prompts of several lengths in one step, chunks, decode steps, runs of several tokens and the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from server.cache.arena import TORCH_DTYPES
from server.cache.layout import Placement
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.interface import ForwardOutput, LoadedModel
from tests.support.checkpoints import BUNDLED, write_checkpoint
from tests.support.models import load
from tests.support.runners import make_runner, prompt

WITHIN = 2e-4
"""Largest difference that is allowed, against the largest value of a row. fp32 sums in another order differ by less."""

ENTRIES = {
    "c4_state_a": "c4_kv",
    "c4_state_b": "c4_kv",
    "c4_index_state_a": "c4_index",
    "c4_index_state_b": "c4_index",
    "c128_state": "c128_kv",
}
"""What is made of a compressor's state."""

ODD: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0],
    "q_lora_rank": 19,
    "o_lora_rank": 5,
    "vocab_size": 101,
    "index_n_heads": 5,
    "index_topk": 11,
    "hc_sinkhorn_iters": 3,
}
CASES: dict[str, dict[str, Any]] = {
    "three heads": {
        "hidden_size": 40, "num_attention_heads": 3, "o_groups": 3, "head_dim": 14, "qk_rope_head_dim": 6,
        "index_head_dim": 18, "n_routed_experts": 5, "moe_intermediate_size": 21, "hc_mult": 3, "sliding_window": 7,
    },
    "one of everything": {
        "hidden_size": 33, "num_attention_heads": 1, "o_groups": 1, "head_dim": 6, "qk_rope_head_dim": 6,
        "index_head_dim": 6, "index_n_heads": 1, "index_topk": 1, "n_routed_experts": 1, "num_experts_per_tok": 1,
        "moe_intermediate_size": 13, "hc_mult": 1, "sliding_window": 1, "hc_sinkhorn_iters": 1,
    },
    "eleven experts, wide heads": {
        "hidden_size": 64, "num_attention_heads": 6, "o_groups": 2, "head_dim": 34, "qk_rope_head_dim": 16,
        "index_head_dim": 16, "n_routed_experts": 11, "num_experts_per_tok": 6, "moe_intermediate_size": 48,
        "hc_mult": 4, "sliding_window": 5, "swiglu_limit": 0.0,
    },
    "many narrow experts": {
        "hidden_size": 17, "num_attention_heads": 4, "o_groups": 4, "head_dim": 22, "qk_rope_head_dim": 22,
        "index_head_dim": 22, "index_n_heads": 64, "index_topk": 24, "n_routed_experts": 29, "num_experts_per_tok": 3,
        "moe_intermediate_size": 3, "hc_mult": 2, "sliding_window": 32,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Both:
    """The same weights in either implementation."""

    python: LoadedModel
    kernels: LoadedModel


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    @lru_cache
    def make(case: str) -> Both:
        path = BUNDLED
        if case in CASES:
            path = tmp_path_factory.mktemp("odd")
            write_checkpoint(path, seed=2, draft=True, **{**ODD, **CASES[case]})
        elif case != "bundled":
            path = tmp_path_factory.mktemp("random")
            write_checkpoint(path, seed=int(case), draft=True)
        return Both(load(path, "python", draft=True), load(path, "cpu", draft=True))

    return make


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Every row near the other's, measured by the row's largest value."""
    ours, theirs = ours.float().flatten(1), theirs.float().flatten(1)
    assert torch.equal(ours.isfinite(), theirs.isfinite()), what
    ours, theirs = ours.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
    error = ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1).clamp(min=1e-3)).max().item()
    assert error < WITHIN, f"{what}: relative error {error:.1e}"


def state(runner: ModelRunner, n: int, place: Placement) -> dict[str, torch.Tensor]:
    """The live rows of every component after ``n`` tokens, ``[rows, elements]``."""
    layout, found = runner.arena.layout, {}
    for name, runs in layout.live_runs(n, place).items():
        component = layout.component(name)
        if component.layer_ids and runs:
            flat = torch.frombuffer(bytearray(runner.arena.read(runs)), dtype=TORCH_DTYPES[component.dtype])
            found[name] = flat.view(-1, len(component.layer_ids) * component.width)
    return found


class Compared:
    """One runner of each kind that take the same steps."""

    def __init__(self, both: Both) -> None:
        self.runners = [make_runner(model, spec_tokens=3) for model in (both.python, both.kernels)]

    def forward(self, segments: list[Segment], what: str) -> list[ForwardOutput]:
        python, kernels = (runner.forward(segments, every_row=True) for runner in self.runners)
        assert_near(kernels.logits, python.logits, f"logits {what}")
        assert_near(kernels.streams, python.streams, f"streams {what}")
        return [python, kernels]

    def draft(self, segments: list[Segment], outputs: list[ForwardOutput], rows: slice, what: str) -> None:
        drafted = [
            runner.draft(segments, output.streams[rows]) for runner, output in zip(self.runners, outputs, strict=True)
        ]
        assert_near(drafted[1].logits, drafted[0].logits, f"logits of the draft {what}")
        assert_near(drafted[1].streams, drafted[0].streams, f"streams of the draft {what}")

    def state(self, n: int, place: Placement) -> dict[str, torch.Tensor]:
        """The kernels' state after ``n`` tokens, which is near the other's."""
        python, kernels = (state(runner, n, place) for runner in self.runners)
        assert python.keys() == kernels.keys()
        for name in python:
            if name != "draft_swa":
                assert_near(kernels[name], python[name], f"{name} after {n} tokens")
        return kernels

    def draft_window(self, place: Placement) -> None:
        slot = [runner.arena.view("draft_swa")[place.slot] for runner in self.runners]
        assert_near(slot[1], slot[0], "window of the draft")


@pytest.mark.parametrize("case", ["bundled", "3", *CASES])
def test_every_number_is_near(both: Callable[[str], Both], case: str) -> None:
    compared = Compared(both(case))
    model = both(case).python
    places = [Placement(3, (7, 2)), Placement(1, (4, 9)), Placement(5, (1, 3))]
    texts = [prompt(n, model, seed=n) for n in (300, 131, 5)]

    done = [0, 0, 0]
    for sizes in ((129, 1, 3), (64, 127, 1), (107, 3, 1)):  # chunks of all three prompts beside each other
        segments = [
            Segment(text[start : start + n], start, place)
            for text, start, n, place in zip(texts, done, sizes, places, strict=True)
        ]
        outputs = compared.forward(segments, f"of chunks {sizes}")
        done = [start + n for start, n in zip(done, sizes, strict=True)]
    for text, place in zip(texts, places, strict=True):
        compared.state(len(text), place)

    drafts = [
        Segment([*text[-n + 1 :], 9], len(text) - n, place)
        for text, n, place in zip(texts, (107, 3, 1), places, strict=True)
        if n > 1
    ]
    compared.draft(drafts, outputs, slice(0, 110), "of two prompts")
    for place in places[:2]:
        compared.draft_window(place)

    for step in range(6):  # decode all three, the last one with two drafted tokens behind
        tail = prompt(3, model, seed=step)
        segments = [
            Segment(tail[:n], len(text), place) for text, n, place in zip(texts, (1, 1, 3), places, strict=True)
        ]
        outputs = compared.forward(segments, f"of step {step}")
        compared.draft([Segment([9], len(texts[0]), places[0])], outputs, slice(0, 1), f"of step {step}")
        for text, segment in zip(texts, segments, strict=True):
            text += segment.token_ids
    for text, place in zip(texts, places, strict=True):
        compared.state(len(text), place)


def test_window_rows_of_the_draft(both: Callable[[str], Both]) -> None:
    compared = Compared(both("3"))
    text, place = prompt(90, both("3").python), Placement(2, (3, 1))
    outputs = compared.forward([Segment(text, 0, place)], "of a prompt")
    for runner, output in zip(compared.runners, outputs, strict=True):
        runner.draft_rows([Segment(text[1:], 0, place)], output.streams[:-1])
    compared.draft_window(place)


def test_state_that_is_not_a_number_comes_out(both: Callable[[str], Both]) -> None:
    """Whatever component it is in: it must be seen in the logits, not be dropped by a maximum."""
    compared = Compared(both("3"))
    text, place = prompt(381, both("3").python), Placement(2, (3, 1))
    compared.forward([Segment(text, 0, place)], "of a prompt")
    for name, runs in compared.runners[0].arena.layout.live_runs(len(text), place).items():
        if name in ("handoff", "draft_swa"):
            continue
        kept = [runner.arena.buffer.clone() for runner in compared.runners]
        for runner in compared.runners:
            for run in runs:
                runner.arena.buffer[run.offset : run.offset + run.nbytes].fill_(0xFF)
        logits = [
            compared.forward([Segment([5 + i], len(text) + i, place)], f"of step {i} with {name} damaged")[1].logits
            for i in range(4)  # up to the end of a group of 4 and of 128
        ]
        after = compared.state(len(text) + len(logits), place)
        if "state" in name:
            assert after[ENTRIES[name]][-1].isnan().any(), name
        elif name != "c4_index":  # that only picks entries: NaN is the best score in either implementation
            assert all(each.isnan().all() for each in logits), name
        for runner, buffer in zip(compared.runners, kept, strict=True):
            runner.arena.buffer.copy_(buffer)


def test_bfloat16_is_as_near_to_fp32_as_the_python_model(tmp_path: Path) -> None:
    """Same weights of 16 bits: the kernels keep activations in fp32, so they may only be nearer."""
    text, place = prompt(150, load(BUNDLED, "python")), Placement(2, (3, 1))

    def logits(kernels: str, dtype: torch.dtype) -> torch.Tensor:
        return (
            make_runner(load(BUNDLED, kernels, dtype=dtype)).forward([Segment(text, 0, place)], every_row=True).logits
        )

    exact = logits("python", torch.float32)
    scale = exact.abs().amax(-1)
    errors = [
        ((logits(kernels, torch.bfloat16) - exact).abs().amax(-1) / scale).median() for kernels in ("python", "cpu")
    ]
    assert errors[1] < errors[0] < 0.05
