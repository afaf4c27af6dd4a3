from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from server.model.interface import LoadedModel
from tests.support.checkpoints import BUNDLED, write_checkpoint
from tests.support.models import BOTH, load


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    oracle: DeepseekV4ForCausalLM
    model: LoadedModel

    @torch.inference_mode()
    def reference(self, ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.oracle(torch.tensor([ids]), use_cache=False).logits[0]
        return logits


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
def random_pairs(tmp_path_factory: pytest.TempPathFactory, kernels: str) -> Callable[[int], Pair]:
    made: dict[int, Pair] = {}

    def make(seed: int) -> Pair:
        if seed not in made:
            path: Path = tmp_path_factory.mktemp(f"random-{seed}")
            made[seed] = Pair(write_checkpoint(path, seed=seed), load(path, kernels))
        return made[seed]

    return make
