from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from server.engine import sampler
from server.engine.edits import mask_of
from server.engine.request import SamplingParams, TokenLogprob
from server.engine.sampler import NonFiniteLogits, RowSampling, ranked, uniform
from server.kernels.sampling import EDIT, SampleKernel
from tests.support.kernel_functions import functions

Sample = Callable[[torch.Tensor, Sequence[RowSampling]], list[TokenLogprob]]

GREEDY = SamplingParams()


@pytest.fixture(params=["numpy", "kernel"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Each of the two forms of the rule."""
    return partial(sampler.sample, kernel=SampleKernel(functions()) if request.param == "kernel" else None)


def row(
    params: SamplingParams = GREEDY, seed: int = 0, position: int = 0, banned: frozenset[int] = frozenset()
) -> RowSampling:
    return RowSampling(params, seed, position, banned)


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Plain textbook version: temperature, top-k, top-p over a full sort."""
    weights = torch.softmax(logits.double() / params.temperature, 0).numpy()
    order = np.lexsort((np.arange(len(weights)), -weights))
    if params.top_k:
        order = order[: params.top_k]
    kept = weights[order] / weights[order].sum()
    n = int(np.searchsorted(np.cumsum(kept), params.top_p)) + 1
    result = np.zeros(len(weights))
    result[order[:n]] = kept[:n] / kept[:n].sum()
    return result


def test_greedy_takes_the_best_and_of_equals_the_lowest_id(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert [t.token_id for t in sample(logits, [row(), row()])] == [1, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.5, top_k=7),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, top_p=0.8, top_k=10),
    ],
)
def test_draws_follow_the_distribution(sample: Sample, params: SamplingParams) -> None:
    """Chi-square over 8,000 draws; the limit is the 99.99 % quantile (Wilson-Hilferty), and the draws are fixed."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * 1.5
    n = 8000
    tokens = sample(logits.expand(n, -1), [row(params, seed=5, position=i) for i in range(n)])
    counts = np.bincount([t.token_id for t in tokens], minlength=24)
    expected = reference_distribution(logits, params) * n
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi2 = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < limit


def test_uniform_numbers_are_uniform_and_of_their_arguments_alone() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(50) for position in range(200)])
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert float(((counts - 500.0) ** 2 / 500.0).sum()) < 55
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert uniform(7, 9) == uniform(7, 9)
    assert len({uniform(7, 9), uniform(9, 7), uniform(7, 9, "accept"), uniform(-7, 9)}) == 4
    assert uniform(2**64 - 1, 0) == uniform(-1, 0)


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_rows_do_not_depend_on_the_batch(sample: Sample, vocab_size: int) -> None:
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(2)) * 4
    kinds = [
        SamplingParams(logprobs=5),
        SamplingParams(temperature=0.8, logprobs=20),
        SamplingParams(temperature=1.0, top_p=0.9, logprobs=0),
        SamplingParams(temperature=1.2, top_k=20),
    ]
    rows = [row(kinds[i % 4], seed=i, position=100 + i, banned=frozenset({i})) for i in range(16)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(16)]
    order = list(range(15, -1, -1))
    assert sample(logits[order], [rows[i] for i in order]) == together[::-1]
    wide = torch.cat([torch.zeros(16, 3), logits], 1)[:, 3:]  # another memory layout
    assert sample(wide, rows) == together


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=30.0), SamplingParams(temperature=9.0, top_p=0.99)],
)
def test_short_cut_for_large_vocabularies_is_exact(
    sample: Sample, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (torch.randn(64, 4000, generator=torch.Generator().manual_seed(3)) * 3).round(decimals=1)  # many ties
    rows = [row(params, seed=1, position=i) for i in range(64)]
    short = sample(logits, rows)
    monkeypatch.setattr("server.engine.sampler.FIRST_RANKED", 10**6)
    assert sample(logits, rows) == short


def test_ties_are_ranked_by_id() -> None:
    values = np.array([1.0, 2.0, 1.0, 2.0, 1.0])
    assert ranked(values, 3).tolist() == [1, 3, 0]
    assert ranked(values, 5).tolist() == [1, 3, 0, 2, 4]


def test_logprobs_are_those_of_the_raw_logits(sample: Sample) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(4))
    expected = torch.log_softmax(logits[0].double(), 0)
    best = int(logits[0].argmax())
    [chosen] = sample(logits, [row(SamplingParams(temperature=0.3, top_k=3, logprobs=4), banned=frozenset({best}))])
    assert chosen.token_id != best
    assert chosen.logprob == pytest.approx(float(expected[chosen.token_id]), abs=1e-12)
    values, ids = expected.topk(4)
    assert [i for i, _ in chosen.top] == ids.tolist()
    assert [v for _, v in chosen.top] == pytest.approx(values.tolist(), abs=1e-12)


def test_banned_ids_are_never_chosen(sample: Sample) -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]]).repeat(200, 1)
    ban = frozenset({0, 99})
    greedy = sample(logits, [row(banned=ban)] * 200)
    drawn = sample(logits, [row(SamplingParams(temperature=5.0), position=i, banned=ban) for i in range(200)])
    assert {t.token_id for t in greedy} == {1}
    assert {t.token_id for t in drawn} == {1, 2}
    assert logits[0, 0] == 9.0  # the caller's logits are left alone


@pytest.mark.parametrize("temperature", [1e-4, 1e-300, 1e30])
def test_extreme_temperatures_are_fine(sample: Sample, temperature: float) -> None:
    logits = torch.tensor([[1.0, 500.0, -1e30, -torch.inf]])
    [chosen] = sample(logits, [row(SamplingParams(temperature=temperature))])
    assert chosen.token_id in range(3)


def test_top_k_and_top_p_limits(sample: Sample) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for params in [SamplingParams(temperature=9.0, top_k=1), SamplingParams(temperature=9.0, top_p=1e-9)]:
        assert {sample(logits, [row(params, position=i)])[0].token_id for i in range(50)} == {1}
    assert sample(logits, [row(SamplingParams(temperature=9.0, top_k=100))])[0].token_id in range(3)


def test_broken_rows_are_named(sample: Sample) -> None:
    logits = torch.zeros(4, 8)
    logits[1, 3] = torch.nan
    logits[3] = -torch.inf
    with pytest.raises(NonFiniteLogits) as failure:
        sample(logits, [row()] * 4)
    assert failure.value.rows == (1, 3)


def test_low_precision_logits_and_no_rows(sample: Sample) -> None:
    logits = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    [chosen] = sample(logits, [row(SamplingParams(logprobs=1))])
    assert chosen.top[0][0] == chosen.token_id == 1
    assert sample(torch.zeros(0, 8), []) == []
    with pytest.raises(ValueError, match="1 rows of logits but 0"):
        sample(logits, [])


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 5.0])
def test_weights_are_those_of_the_softmax(temperature: float) -> None:
    values = np.linspace(-30, 4, 50_000, dtype=np.float32)
    exact = sampler.BEST_WEIGHT * np.exp((values.astype(np.float64) - values[-1]) / temperature)
    weights = sampler.token_weights(values, temperature)
    assert weights[-1] == sampler.BEST_WEIGHT
    assert np.all(np.abs(weights - exact) <= 0.5 + 4e-6 * exact)


def test_min_p_leaves_what_has_that_part_of_the_best(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 0.5, 0.2, 1.0, 0.5]]).log()
    rows = [row(SamplingParams(temperature=1.0, min_p=0.3), position=i) for i in range(300)]
    counts = np.bincount([t.token_id for t in sample(logits.expand(300, -1), rows)], minlength=5)
    assert (counts > 0).tolist() == [False, True, False, True, True]
    only_best = [row(SamplingParams(temperature=1.0, min_p=1.0), position=i) for i in range(50)]
    assert {t.token_id for t in sample(logits.expand(50, -1), only_best)} == {3}


PENALIZED = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)


def test_edits_are_applied_in_their_order(sample: Sample) -> None:
    logits = torch.tensor([[2.0, -1.0, 4.0, 3.0, 5.0]])
    table = np.array([(0, 3, 0.0), (1, 0, 9.0), (2, -1, 0.5), (3, 1, 0.0), (4, 2, -np.inf), (77, 1, 5.0)], EDIT)
    expected = torch.tensor([[2.0 / 2 - 1.5 - 0.25, -2.0 + 9.0, 4.5, 3.0 / 2 - 0.75, -torch.inf]])
    params = replace(PENALIZED, temperature=1.0, logprobs=5)
    for i in range(30):
        [edited] = sample(logits, [RowSampling(params, 1, i, edits=table)])
        [plain] = sample(expected, [RowSampling(params, 1, i)])
        assert edited.token_id == plain.token_id
        assert [token_id for token_id, _ in edited.top] == [4, 2, 3, 0, 1], "log probabilities are of the raw logits"
    [best] = sample(logits, [RowSampling(params, 1, 1, banned=frozenset({1}), edits=table)])
    assert best.token_id == 2, "a ban and an edit of the same token"


def test_an_edit_of_the_row_takes_the_place_of_the_request_s(sample: Sample) -> None:
    logits = torch.tensor([[4.0, 3.9, 0.0]])
    request = np.array([(0, -1, 0.0), (1, 5, 0.0)], EDIT)
    assert sample(logits, [RowSampling(PENALIZED, 1, 1, edits=request)])[0].token_id == 0
    own = np.array([(1, 0, 3.0)], EDIT)  # 3.9 / 2 + 3, and not also the request's penalties
    assert sample(logits, [RowSampling(PENALIZED, 1, 1, edits=request, own=own)])[0].token_id == 1


def test_a_mask_lets_through_what_it_names_and_nothing_behind_its_end(sample: Sample) -> None:
    logits = torch.zeros(1, 100)
    logits[0, [3, 40, 99]] = torch.tensor([1.0, 2.0, 3.0])
    for allowed, best in [((3, 40), 40), ((3, 5), 3), ((0, 99), 99), ((7,), 7)]:
        assert sample(logits, [RowSampling(GREEDY, 1, 1, mask=mask_of(allowed))])[0].token_id == best
    drawn = RowSampling(SamplingParams(temperature=1.0, top_k=5), 1, 1, mask=mask_of((3, 40)))
    assert sample(logits, [drawn])[0].token_id in (3, 40)
    biased = np.array([(99, -1, 100.0)], EDIT)
    assert sample(logits, [RowSampling(GREEDY, 1, 1, edits=biased, mask=mask_of((3, 40)))])[0].token_id == 40


def test_a_row_whose_request_forbids_everything_is_told_from_a_broken_one(sample: Sample) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 3] = torch.nan
    nothing = np.zeros(1, np.uint32)
    with pytest.raises(NonFiniteLogits, match=r"\[2\] the request itself forbids every token") as failure:
        sample(logits, [row(), row(), RowSampling(GREEDY, 1, 1, mask=nothing)])
    assert failure.value.rows == (1, 2)
    assert failure.value.emptied == {2}
