"""The sampler of the kernels chooses what the one in numpy chooses: always, on every machine, in every batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from server.engine.edits import Table, mask_of
from server.engine.request import SamplingParams, TokenLogprob
from server.engine.sampler import NonFiniteLogits, RowSampling, sample
from server.kernels.sampling import EDIT, SampleKernel
from tests.support.kernel_functions import EVERY_ISA, functions

VOCABULARIES = (1, 2, 5, 17, 255, 256, 257, 529, 1000, 4097, 20_000)
SPREADS = np.array([0, 0.01, 0.3, 1, 2, 4, 10], np.float32)
Rng = np.random.Generator


def draw_logits(rng: Rng, n_rows: int) -> torch.Tensor:
    """Flat and peaked rows, many ties, many that are -infinity."""
    vocab_size = int(rng.choice(VOCABULARIES))
    logits = rng.standard_normal((n_rows, vocab_size)).astype(np.float32) * float(
        rng.choice([0, 0.01, 0.3, 1, 2, 4, 10])
    )
    if rng.random() < 0.3:
        logits = np.round(logits * 4) / np.float32(4)
    if rng.random() < 0.2:
        logits[:, 1:][:, rng.random(vocab_size - 1) < 0.5] = -np.inf
    return torch.from_numpy(logits)


def draw_table(rng: Rng, vocab_size: int) -> Table:
    table = np.zeros(30, EDIT)
    table["token"] = rng.choice(vocab_size + 9, 30, replace=False)
    table["count"] = rng.integers(-1, 4, 30)
    table["bias"] = rng.choice(np.array([0, 0, 1.5, -2.5, 100, -np.inf], np.float32), 30)
    return table


def draw_row(rng: Rng, vocab_size: int) -> RowSampling:
    params = SamplingParams(
        temperature=float(rng.choice([0, 0.1, 0.8, 1, 1.5, 30])),
        top_p=float(rng.choice([1, 0.999, 0.95, 0.5, 1e-9])),
        top_k=int(rng.choice([0, 0, 0, 1, 3, 50, 1000])),
        min_p=float(rng.choice([0, 0, 0.05, 1])),
        logprobs=(None, None, 0, 5)[rng.integers(4)],
        repetition_penalty=float(rng.choice([1, 1.3, 0.7])),
        presence_penalty=float(rng.choice([0, 0.4])),
        frequency_penalty=float(rng.choice([0, 0.2])),
    )
    banned: frozenset[int] = frozenset()
    edits, own, mask = None, None, None
    if vocab_size > 40:
        if rng.random() < 0.3:
            banned = frozenset(rng.integers(0, vocab_size + 9, 4).tolist())
        edits = draw_table(rng, vocab_size) if rng.random() < 0.3 else None
        own = draw_table(rng, vocab_size) if rng.random() < 0.3 else None
        if rng.random() < 0.3:
            mask = mask_of(rng.integers(0, vocab_size + 9, int(rng.choice([3, vocab_size]))).tolist())
    return RowSampling(params, int(rng.integers(1 << 62)), int(rng.integers(1 << 20)), banned, edits, own, mask)


def outcome(
    logits: torch.Tensor, rows: list[RowSampling], kernel: SampleKernel | None
) -> list[TokenLogprob] | tuple[object, ...]:
    try:
        return sample(logits, rows, kernel)
    except NonFiniteLogits as error:
        return error.rows, error.emptied


def compare(seed: int, n_batches: int) -> None:
    rng = np.random.default_rng(seed)
    kernels = [SampleKernel(functions(isa)) for isa in EVERY_ISA]
    for _ in range(n_batches):
        logits = draw_logits(rng, 8)
        rows = [draw_row(rng, logits.shape[1]) for _ in range(8)]
        expected, first, *others = (outcome(logits, rows, kernel) for kernel in (None, *kernels))
        assert all(other == first for other in others), "an instruction set makes a difference"
        if isinstance(expected, tuple) or isinstance(first, tuple):
            assert expected == first
            continue
        for row, numpy, kernel in zip(rows, expected, first, strict=True):
            assert kernel.token_id == numpy.token_id, row
            assert kernel.logprob == pytest.approx(numpy.logprob, abs=1e-12)
            assert [i for i, _ in kernel.top] == [i for i, _ in numpy.top]
            assert [v for _, v in kernel.top] == pytest.approx([v for _, v in numpy.top], abs=1e-12)


def test_kernel_and_numpy_choose_the_same_tokens() -> None:
    compare(seed=1, n_batches=300)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10, 20))
def test_kernel_and_numpy_choose_the_same_tokens_for_long(seed: int) -> None:
    compare(seed, n_batches=3000)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 3.0])
def test_a_large_vocabulary_needs_no_other_rule(scale: float) -> None:
    logits = torch.randn(4, 129_280, generator=torch.Generator().manual_seed(3)) * scale
    rows = [
        RowSampling(SamplingParams(temperature=0.8, top_p=0.95, logprobs=20), 1, 1),
        RowSampling(SamplingParams(temperature=1.0), 1, 2),
        RowSampling(SamplingParams(temperature=0.8, top_k=50), 1, 3),
        RowSampling(SamplingParams(temperature=0.8, top_k=3000, top_p=0.5), 1, 4),
    ]
    expected = [each.token_id for each in sample(logits, rows)]
    for isa in EVERY_ISA:
        assert [each.token_id for each in sample(logits, rows, SampleKernel(functions(isa)))] == expected


def test_rows_do_not_depend_on_the_batch_the_threads_or_the_place_in_memory() -> None:
    rng = np.random.default_rng(5)
    logits = torch.randn(12, 20_000, generator=torch.Generator().manual_seed(4)) * 2
    rows = [draw_row(rng, 20_000) for _ in range(12)]
    kernel = SampleKernel(functions())
    together = sample(logits, rows, kernel)
    assert together == [sample(logits[i : i + 1], [rows[i]], kernel)[0] for i in range(12)]
    assert together == sample(logits, rows, SampleKernel(functions(), threads=3))
    moved = torch.cat([torch.zeros(12, 5), logits], 1)[:, 5:]  # another alignment and distance of rows
    assert together == sample(moved, rows, kernel)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 256, 599])
def test_what_is_not_finite_is_seen_wherever_it_stands(value: float, place: int) -> None:
    kernel = SampleKernel(functions())
    logits = torch.zeros(3, 600)
    logits[1, place] = value
    rows = [RowSampling(SamplingParams(temperature=t), 1, 1) for t in (0.0, 1.0, 0.0)]
    assert outcome(logits, rows, kernel) == outcome(logits, rows, None) == ((1,), frozenset())
    spared = [replace(row, banned=frozenset({place})) for row in rows]
    assert outcome(logits, spared, kernel) == outcome(logits, spared, None) != ((1,), frozenset())


def test_draws_are_those_of_the_written_rule() -> None:
    """Fixed tokens: whoever changes the rule changes them, and must say so."""
    logits = torch.linspace(-3, 3, 300).sin()[None] * 4
    for kernel in (None, SampleKernel(functions())):
        drawn = [
            sample(logits, [RowSampling(SamplingParams(temperature=0.8, top_p=0.95), 7, i)], kernel)[0].token_id
            for i in range(8)
        ]
        assert drawn == DRAWN


DRAWN = [239, 195, 221, 231, 185, 216, 220, 271]


@pytest.mark.parametrize("n_rows", [0, 2])
def test_rows_that_do_not_fit_the_logits_are_refused(n_rows: int) -> None:
    kernel = SampleKernel(functions())
    with pytest.raises(ValueError, match=f"{n_rows} rows for logits"):
        kernel(torch.zeros(1, 8), [b""] * n_rows)
    with pytest.raises(ValueError, match="float64"):
        kernel(torch.zeros(1, 8, dtype=torch.float64), [b""])
    with pytest.raises(ValueError, match="rows for logits"):
        kernel(torch.zeros(8, 1).T.expand(1, 8)[:, ::2], [b""])


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**70])
def test_a_top_k_of_any_size_means_all_tokens(top_k: int) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5))
    rows = [RowSampling(SamplingParams(temperature=1.0, top_k=top_k), 1, 2)]
    assert outcome(logits, rows, SampleKernel(functions())) == outcome(logits, rows, None)
