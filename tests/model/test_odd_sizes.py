"""A row's result is the same bits in every batch, also where no size is a multiple of a vector's width, and with
several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from server.cache.layout import Placement
from server.engine.request import SamplingParams
from server.engine.runner import ModelRunner
from server.engine.sampler import RowSampling, sample
from server.model import batch_invariant
from server.model.batch import Segment
from server.model.interface import LoadedModel
from server.model.numerics import OFFICIAL, PLAIN
from server.model.rope import Rotation
from tests.support.checkpoints import write_checkpoint
from tests.support.models import BOTH, load
from tests.support.runners import make_runner, prefill, prompt

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0],
    "hidden_size": 33,
    "q_lora_rank": 19,
    "o_lora_rank": 5,
    "vocab_size": 101,
    "sliding_window": 7,
    "index_n_heads": 5,
    "index_head_dim": 18,
    "index_topk": 11,
    "head_dim": 14,
    "qk_rope_head_dim": 6,
    "hc_sinkhorn_iters": 3,
}


def sizes(n_experts: int, n_streams: int, n_heads: int, n_groups: int, inner: int, **more: int) -> dict[str, Any]:
    return {
        "n_routed_experts": n_experts,
        "hc_mult": n_streams,
        "num_attention_heads": n_heads,
        "o_groups": n_groups,
        "moe_intermediate_size": inner,
        **more,
    }


CASES = {
    "3 experts, 1 stream, 1 head": sizes(3, 1, 1, 1, 13),
    "5 experts, 3 streams, 3 heads": sizes(5, 3, 3, 3, 21),
    "8 experts, 4 streams, 4 heads": sizes(8, 4, 4, 2, 48),
    "11 experts, 3 streams, 3 heads": sizes(11, 3, 3, 1, 35),
    "11 wide experts": sizes(11, 1, 3, 3, 7, num_experts_per_tok=6),
    "everything rotates": sizes(3, 3, 3, 1, 17, head_dim=22, qk_rope_head_dim=22, index_head_dim=22),
    "official numerics": sizes(5, 3, 3, 3, 21, index_head_dim=16),
}
N = 150


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @lru_cache
    def write(case: str) -> Path:
        path: Path = tmp_path_factory.mktemp("odd")
        write_checkpoint(path, seed=1, draft=True, **{**SHAPE, **CASES[case]})
        return path

    return write


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


every_number_of_threads = pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
MODELS = [(case, 1) for case in CASES]
MODELS += [("8 experts, 4 streams, 4 heads", 2), ("everything rotates", 3), ("official numerics", 2)]


@pytest.fixture(params=BOTH)
def model(checkpoint: Callable[[str], Path], case: str, request: pytest.FixtureRequest) -> LoadedModel:
    numerics = OFFICIAL if case.startswith(OFFICIAL.name) else PLAIN
    return load(checkpoint(case), request.param, draft=True, numerics=numerics)


def place(i: int) -> Placement:
    return Placement(i + 1, (i + 1,))


@pytest.mark.parametrize(("case", "threads"), MODELS, indirect=["threads"])
def test_rows_are_the_same_in_every_chunk_and_batch(model: LoadedModel, threads: int) -> None:
    ids = prompt(N, model)
    whole = prefill(make_runner(model, threads=threads), ids, place(0), N)
    for chunk in (16, 37):
        assert torch.equal(whole, prefill(make_runner(model, threads=threads), ids, place(1), chunk)), (
            f"chunk of {chunk}"
        )

    runner = make_runner(model, threads=threads)
    n_rest = [1, 2, 5, 9, 1]  # the same prompt five times, with other lengths of what is left of it
    for i, rest in enumerate(n_rest):
        prefill(runner, ids[:-rest], place(i), 64)
    segments = [Segment(ids[-rest:], N - rest, place(i)) for i, rest in enumerate(n_rest)]
    rows = runner.forward(segments, every_row=True).logits.split(n_rest)
    for rest, mine in zip(n_rest, rows, strict=True):
        assert torch.equal(mine, whole[-rest:]), f"the last {rest} of {N} tokens in a batch"

    alone = make_runner(model, threads=threads)
    prefill(alone, ids[:-1], place(3), 64)
    assert torch.equal(alone.forward([Segment(ids[-1:], N - 1, place(3))]).logits, whole[-1:]), "one row alone"


@pytest.mark.parametrize(("case", "threads"), MODELS, indirect=["threads"])
def test_drafted_rows_are_the_same_alone_and_in_a_batch(model: LoadedModel, threads: int) -> None:
    ids = prompt(14, model)
    runner, other = make_runner(model, threads=threads), make_runner(model, threads=threads)
    streams = runner.forward([Segment(ids[:-1], 0, place(0))]).streams
    single = draft_alone(runner, ids, streams)
    n_texts = 5
    together = other.draft([Segment(ids[1:], 0, place(i)) for i in range(n_texts)], torch.cat([streams] * n_texts))
    for i in range(n_texts):
        assert torch.equal(together.logits[i], single[-1])


def draft_alone(runner: ModelRunner, ids: list[int], streams: torch.Tensor) -> list[torch.Tensor]:
    return [
        runner.draft([Segment([ids[t + 1]], t, place(0))], streams[t : t + 1]).logits[0] for t in range(len(ids) - 1)
    ]


@every_number_of_threads
@pytest.mark.usefixtures("threads")
def test_log_probabilities_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(37, 529, generator=torch.Generator().manual_seed(0)) * 5
    how = [RowSampling(SamplingParams(temperature=0.8, top_p=0.9, logprobs=5), seed=7, position=i) for i in range(37)]
    together = sample(logits, how)
    assert together == [sample(logits[i : i + 1].clone(), how[i : i + 1])[0] for i in range(37)]


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": batch_invariant.sigmoid,
    "softplus": batch_invariant.softplus,
    "swiglu": lambda x: batch_invariant.swiglu_(x.clone(), torch.ones_like(x)),
    "exp": torch.exp,
    "log1p": lambda x: torch.log1p(x.abs()),
    "cos": torch.cos,
    "sin": torch.sin,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "addcmul": lambda x: torch.addcmul(x, x, 0.37 * x),
    "softmax of a row": lambda x: x.view(-1, 3).softmax(-1).flatten(),
    "sum of a row": lambda x: x.view(-1, 3).sum(-1),
}  # fmt: skip


@every_number_of_threads
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_element_is_the_same_bits_wherever_it_lies(name: str) -> None:
    """What the model is made of, by torch and here: large tensors, which threads share, against pieces of every
    length.
    """
    function = ELEMENTWISE[name]
    x = torch.randn(3 * 22_221, generator=torch.Generator().manual_seed(1)) * 8
    whole, start = function(x), 0
    pieces: list[torch.Tensor] = []
    while start < len(x):
        step = 3 * (1 + len(pieces) % 70)
        pieces.append(function(x[start : start + step].clone()))
        start += step
    assert torch.equal(whole, torch.cat(pieces))


@every_number_of_threads
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n", [8, 128])
@pytest.mark.parametrize("width", [9, 33, 64])
def test_pooled_entries_are_the_same_alone_and_in_a_batch(n: int, width: int) -> None:
    generator = torch.Generator().manual_seed(2)
    scores, values = (torch.randn(48, n, width, generator=generator) for _ in range(2))
    scores[0, : n // 2] = -torch.inf
    together = batch_invariant.softmax_pool(scores, values)
    assert torch.allclose(together, (scores.softmax(1) * values).sum(1), atol=1e-6)
    for i in range(0, 48, 16):
        assert torch.equal(together[i : i + 16], batch_invariant.softmax_pool(scores[i : i + 16], values[i : i + 16]))


@every_number_of_threads
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_are_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    n_rows, heads, dim = 2048, 3, 44
    x = torch.randn(n_rows, heads, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    positions, speeds = torch.arange(n_rows), torch.rand(dim // 2, generator=torch.Generator().manual_seed(4))
    whole = Rotation(positions, speeds).apply_(x.clone())
    for i in range(0, n_rows, 16):
        part = slice(i, i + 16)
        assert torch.equal(whole[part], Rotation(positions[part], speeds).apply_(x[part].clone()))
