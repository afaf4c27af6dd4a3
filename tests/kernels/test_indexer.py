"""Which entries a row reads: the scores of the indexer, and the best of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from server.kernels import abi
from server.kernels.build import Isa
from tests.support.kernel_functions import EVERY_ISA, Kernels, bits

Shape = tuple[int, int, int]
SHAPES: list[Shape] = [(32, 16, 50), (5, 18, 37), (1, 22, 3), (70, 40, 64), (16, 128, 9), (33, 7, 130)]
"""Heads, channels of one, visible entries."""
ENTRIES_OF_A_PAGE = 8


def best(scores: torch.Tensor, k: int, isa: Isa | None = None) -> list[int]:
    picked = torch.empty(k + 1, dtype=torch.int64)
    Kernels(isa).call("kernels_pick_best", scores, len(scores), k, picked)
    return picked[:k].tolist()


def sorted_best(scores: torch.Tensor, k: int) -> list[int]:
    """What the Python model picks: a stable sort, in which NaN comes first."""
    return scores.sort(descending=True, stable=True).indices[:k].sort().values.tolist()


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("n", [2, 3, 17, 64, 333, 1000])
def test_the_best_are_those_of_a_stable_sort(n: int, isa: Isa) -> None:
    generator = torch.Generator().manual_seed(n)
    smooth = torch.randn(n, generator=generator)
    special = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3e38, -1.0])
    mixed = special[torch.randint(len(special), (n,), generator=generator)]
    coarse = (smooth * 2).round()
    for scores in (
        smooth,
        mixed,
        coarse,
        torch.zeros(n),
        torch.full((n,), torch.nan),
        -smooth.abs(),
        smooth.sort().values,
    ):
        for k in {1, 2, n // 3 + 1, n - 1}:
            if k < n:
                assert best(scores, k, isa) == sorted_best(scores, k)


class Index:
    """Random keys of one request in pages that do not follow each other, and a query for them."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        self.heads, self.width, self.visible = shape
        generator = torch.Generator().manual_seed(self.heads)
        n_pages = -(-self.visible // ENTRIES_OF_A_PAGE)
        self.pages = 2 * torch.randperm(n_pages, generator=generator) + 1
        self.pool = torch.full((2 * n_pages + 1, ENTRIES_OF_A_PAGE, 3, self.width), torch.nan, dtype=dtype)
        self.keys = torch.randn(self.visible, self.width, generator=generator).to(dtype)
        entry = torch.arange(self.visible)
        self.pool[self.pages[entry // ENTRIES_OF_A_PAGE], entry % ENTRIES_OF_A_PAGE, 1] = self.keys
        self.query = torch.randn(self.heads, self.width, generator=generator)
        self.weights = torch.randn(self.heads, generator=generator)

    def layer(self) -> Any:
        size = self.pool.element_size()
        pool = abi.Pool(
            data=self.pool.data_ptr() + self.width * size,
            item_stride=self.pool.stride(0) * size,
            row_stride=self.pool.stride(1) * size,
            rows=ENTRIES_OF_A_PAGE,
            items=len(self.pool),
            width=self.width,
            dtype=abi.Dtype.BF16 if self.pool.dtype == torch.bfloat16 else abi.Dtype.FP32,
        )
        layer = abi.Attention(index_heads=self.heads, index_dim=self.width)
        layer.indexer.entries = pool
        return layer

    def kernel(self, isa: Isa | None = None) -> torch.Tensor:
        scores = torch.empty(self.visible)
        Kernels(isa).call(
            "kernels_score_entries", self.layer(), self.query, self.weights, self.pages, self.visible, scores
        )
        return scores

    def formula(self) -> torch.Tensor:
        dots = (self.query.double() @ self.keys.double().T).relu()
        weights = self.weights.double() * (self.width**-0.5 * self.heads**-0.5)
        scores: torch.Tensor = weights @ dots
        return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_are_near_the_formula(shape: Shape, dtype: torch.dtype) -> None:
    index = Index(shape, dtype)
    torch.testing.assert_close(index.kernel().double(), index.formula(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_gives_the_same_scores(shape: Shape, dtype: torch.dtype) -> None:
    scores = [bits(Index(shape, dtype).kernel(isa)) for isa in EVERY_ISA]
    assert all(torch.equal(scores[0], other) for other in scores)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_score_depends_on_no_other_entry(shape: Shape) -> None:
    index = Index(shape)
    whole = index.kernel()
    for visible in range(1, index.visible):
        index.visible = visible
        assert torch.equal(index.kernel(), whole[:visible])


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_not_finite_stays_so(shape: Shape, isa: Isa) -> None:
    index = Index(shape)
    clean, entry = index.kernel(isa), index.visible // 2
    place = index.pool[index.pages[entry // ENTRIES_OF_A_PAGE], entry % ENTRIES_OF_A_PAGE, 1]
    for value in (torch.nan, torch.inf, -torch.inf):
        place[2] = index.keys[entry, 2] = value
        scores, expected = index.kernel(isa), index.formula()
        assert torch.equal(scores[entry].isnan(), expected[entry].isnan())
        assert scores[entry] == expected[entry] or scores[entry].isnan()
        others = torch.arange(index.visible) != entry
        assert torch.equal(scores[others], clean[others])
