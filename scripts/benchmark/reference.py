"""The reference: transformers' ``generate`` in this process, on the same checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4ForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from .measurement import Prompt, Stream

KERNELS = ("attn_implementation", "experts_implementation")


class Transformers:
    """Greedy ``generate`` with its own cache, as it comes. ``dtype`` is torch's name of one."""

    def __init__(self, model: Path, dtype: str = "float32") -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._model: Any = DeepseekV4ForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @property
    def kernels(self) -> dict[str, str]:
        """Which of its implementations transformers has chosen."""
        config = self._model.config
        return {name: str(getattr(config, f"_{name}", None)) for name in KERNELS}

    def decode(self, prompts: Sequence[Prompt], n_tokens: int) -> list[Stream]:
        """Prompts of one length as one batch; every request gets its tokens at the same time."""
        times = self._generate(prompts, n_tokens)
        return [Stream(times, list(range(1, n_tokens + 1))) for _ in prompts]

    def prefill_s(self, prompt: Prompt) -> float:
        """Seconds from the prompt to its first token."""
        started = time.perf_counter()
        return self._generate([prompt], 1)[0] - started

    def _generate(self, prompts: Sequence[Prompt], n_tokens: int) -> list[float]:
        ids, clock = torch.tensor(prompts), _Clock()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_tokens,
            min_new_tokens=n_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock.times_s


class _Clock(StoppingCriteria):
    """Stops nothing; notes when each token was chosen."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)
