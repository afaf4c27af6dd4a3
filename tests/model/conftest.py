from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.loader import load_model
from server.model.network import DeepseekV4
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED, write_checkpoint


def make_runner(model: DeepseekV4, *, spec_tokens: int = 0, poison: bool = True, pages: int = 16) -> ModelRunner:
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    components = state_components(config, dtype, spec_tokens, draft=model.nextn is not None)
    geometry = CacheGeometry(256, pages, 20, config.sliding_window, spec_tokens, components)
    return ModelRunner(model, Arena(ArenaLayout.from_geometry(geometry), poison=poison))


def prompt(n: int, model: DeepseekV4, seed: int = 0) -> list[int]:
    """``n`` random token ids, without the special ones."""
    return random.Random(seed).choices(range(3, model.config.vocab_size), k=n)


def prefill(runner: ModelRunner, ids: list[int], placement: Placement, chunk: int) -> torch.Tensor:
    """Logits ``[n, vocab]`` of a prompt computed in chunks."""
    parts = [
        runner.forward([Segment(ids[i : i + chunk], i, placement)], every_row=True).logits
        for i in range(0, len(ids), chunk)
    ]
    return torch.cat(parts)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    oracle: DeepseekV4ForCausalLM
    model: DeepseekV4

    @torch.inference_mode()
    def reference(self, ids: list[int]) -> torch.Tensor:
        return self.oracle(torch.tensor([ids]), use_cache=False).logits[0]


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
