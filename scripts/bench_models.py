"""What is measured inside the benchmark's own process: transformers' ``generate``, and this project's engine."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_data import BenchFailed, Stream
from transformers import DeepseekV4ForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from server.cache.digest import live_digests
from server.engine.events import Died, Event, Failed, Finished, Generate, Output
from server.engine.request import GenerationRequest, SamplingParams
from server.node.build import build_resources
from server.node.options import NodeOptions

EVENT_TIMEOUT_S = 300.0

Prompt = tuple[int, ...]


def node_options(model: Path, threads: int) -> NodeOptions:
    """The options that a launcher would have: its defaults, with this model and thread count."""
    return NodeOptions(model=model, threads=threads)


class Transformers:
    """The reference: greedy ``generate`` with its own cache, in fp32, as it comes."""

    def __init__(self, model: Path) -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._model: Any = DeepseekV4ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

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


KERNELS = ("attn_implementation", "experts_implementation")


class _Clock(StoppingCriteria):
    """Stops nothing; notes when each token was chosen."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class LocalEngine:
    """This project's engine thread in this process, as a decode node with ``--local-prefill`` runs it."""

    def __init__(self, options: NodeOptions) -> None:
        resources = build_resources("decode", options)
        self.arena, self.tokenizer = resources.context.arena, resources.tokenizer
        self.max_context = resources.settings["max_context"]
        self._allocator = resources.context.allocator
        self._events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._engine = resources.engine(lambda event: self._events.put((time.perf_counter(), event)))
        self._engine.start()

    def close(self) -> None:
        self._engine.stop()

    def decode(self, prompts: Sequence[Prompt], n_tokens: int) -> list[Stream]:
        """All prompts submitted at once; the stream of each."""
        sampling = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
        for key, prompt in enumerate(prompts):
            placement = self._allocator.reserve(key, len(prompt) + n_tokens)
            if placement is None:
                raise BenchFailed(f"{len(prompts)} requests of {len(prompt) + n_tokens} tokens do not fit the pools")
            self._engine.submit(Generate(key, GenerationRequest(f"bench-{key}", prompt, sampling), placement))
        streams = [Stream() for _ in prompts]
        running = set(range(len(prompts)))
        while running:
            at, event = self._events.get(timeout=EVENT_TIMEOUT_S)
            match event:
                case Output(key=int(key)):
                    seen = streams[key].counts[-1] if streams[key].counts else 0
                    streams[key].add(at, seen + len(event.output.token_ids))
                case Finished(key=int(key)):
                    self._allocator.release(key)
                    running.remove(key)
                case Failed() | Died():
                    raise BenchFailed(f"the engine failed: {event.message}")
                case _:
                    pass
        return streams

    def prefill_s(self, prompt: Prompt) -> float:
        """Seconds from the prompt to its first token."""
        started = time.perf_counter()
        return self.decode([prompt], 1)[0].times_s[0] - started

    def digest_s(self, n: int) -> float:
        """Seconds of one digest pass over the live bytes of ``n`` prompt tokens, the pass that each node takes once."""
        placement = self._allocator.reserve("digest", n)
        if placement is None:
            raise BenchFailed(f"{n} tokens do not fit the pools")
        started = time.perf_counter()
        live_digests(self.arena, n, placement)
        elapsed_s = time.perf_counter() - started
        self._allocator.release("digest")
        return elapsed_s
