from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from server.model.interface import LoadedModel
from tests.support.checkpoints import BUNDLED, write_checkpoint
from tests.support.models import BOTH, load
from tests.support.quantized_checkpoints import make_quantized, write_plain_twin


@contextlib.contextmanager
def earlier_entries_win() -> Iterator[list[torch.Tensor]]:
    """Among index scores that are equal bit for bit transformers takes any; here the earlier ones are taken.

    A query whose heads are all below zero scores 0 everywhere, so that does happen. Only the indexer calls the method.
    Yields a list that gets, by layer, how far the last entry that was taken lies above the first that was not:
    ``[rows]``, as a share of the row's largest score.
    """
    margins: list[torch.Tensor] = []

    def topk(scores: torch.Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        if values.shape[dim] > k:
            largest = values.masked_fill(values.isinf(), 0).abs().amax(dim)
            margins.append(((values[..., k - 1] - values[..., k]) / largest)[0])
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with mock.patch.object(torch.Tensor, "topk", topk):
        yield margins


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    oracle: DeepseekV4ForCausalLM
    model: LoadedModel

    def reference(self, ids: list[int]) -> torch.Tensor:
        return self.reference_and_margins(ids)[0]

    @torch.inference_mode()
    def reference_and_margins(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of every position, and by what margin its entries were chosen in the layer that was least decided."""
        with earlier_entries_win() as margins:
            logits: torch.Tensor = self.oracle(torch.tensor([ids]), use_cache=False).logits[0]
        decided = torch.full((len(ids),), torch.inf)
        for margin in margins:
            decided = torch.fmin(decided, margin)
        return logits, decided


@pytest.fixture(scope="session")
def bundled_oracle() -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


@pytest.fixture(scope="session", params=BOTH)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def bundled_pair(bundled_oracle: DeepseekV4ForCausalLM, kernels: str) -> Pair:
    return Pair(bundled_oracle, load(BUNDLED, kernels))


@pytest.fixture(scope="session")
def quantized_pair(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> Pair:
    """A quantized checkpoint here; there the numbers that it stands for, as a plain checkpoint."""
    path, twin = tmp_path_factory.mktemp("quantized"), tmp_path_factory.mktemp("twin")
    made = make_quantized(path, seed=4, shards=3, draft=False)
    write_plain_twin(made, twin)
    return Pair(DeepseekV4ForCausalLM.from_pretrained(twin, dtype=torch.float32).eval(), load(path, kernels))


@pytest.fixture(scope="session")
def random_pairs(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> Callable[[int], Pair]:
    made: dict[int, Pair] = {}

    def make(seed: int) -> Pair:
        if seed not in made:
            path: Path = tmp_path_factory.mktemp(f"random-{seed}")
            made[seed] = Pair(write_checkpoint(path, seed=seed), load(path, kernels))
        return made[seed]

    return make
