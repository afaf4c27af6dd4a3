from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from server.model.loader import load_model
from server.model.network import DeepseekV4
from tests.support.checkpoints import BUNDLED, write_checkpoint


@contextlib.contextmanager
def earlier_entries_win() -> Iterator[None]:
    """Among index scores that are equal bit for bit transformers takes any; here the earlier ones are taken.

    A query whose heads are all below zero scores 0 everywhere, so that does happen. Only the indexer calls the method.
    """

    def topk(scores: torch.Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with mock.patch.object(torch.Tensor, "topk", topk):
        yield


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    oracle: DeepseekV4ForCausalLM
    model: DeepseekV4

    @torch.inference_mode()
    def reference(self, ids: list[int]) -> torch.Tensor:
        with earlier_entries_win():
            logits: torch.Tensor = self.oracle(torch.tensor([ids]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="session")
def bundled_pair() -> Pair:
    oracle = DeepseekV4ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    return Pair(oracle, load_model(BUNDLED))


@pytest.fixture(scope="session")
def random_pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Pair]:
    made: dict[int, Pair] = {}

    def make(seed: int) -> Pair:
        if seed not in made:
            path: Path = tmp_path_factory.mktemp(f"random-{seed}")
            made[seed] = Pair(write_checkpoint(path, seed=seed), load_model(path))
        return made[seed]

    return make
