"""A model over its own memory, without an engine, and prompts for it."""

from __future__ import annotations

import random

import torch

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.interface import LoadedModel
from server.model.state import state_components


def make_runner(
    model: LoadedModel,
    *,
    spec_tokens: int = 0,
    poison: bool = True,
    pages: int = 16,
    threads: int = 1,
    kv_dtype: str = "model",
    index_dtype: str = "auto",
) -> ModelRunner:
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    components = state_components(
        config, dtype, spec_tokens, draft=model.drafts, kv_dtype=kv_dtype, index_dtype=index_dtype
    )
    geometry = CacheGeometry(256, pages, 20, config.sliding_window, spec_tokens, components)
    runner = ModelRunner(model, Arena(ArenaLayout.from_geometry(geometry), poison=poison))
    runner.set_threads(threads)
    return runner


def prompt(n: int, model: LoadedModel, seed: int = 0) -> list[int]:
    """``n`` random token ids, without the special ones."""
    return random.Random(seed).choices(range(3, model.config.vocab_size), k=n)


def prefill(runner: ModelRunner, ids: list[int], placement: Placement, chunk: int) -> torch.Tensor:
    """Logits ``[n, vocab]`` of a prompt computed in chunks."""
    parts = [
        runner.forward([Segment(ids[i : i + chunk], i, placement)], every_row=True).logits
        for i in range(0, len(ids), chunk)
    ]
    return torch.cat(parts)
