"""This project's engine thread in this process, over pools as large as a node's are by default."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from server.cache.allocator import Allocator
from server.cache.arena import Arena
from server.cache.digest import live_digests
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.engine.engine import Engine
from server.engine.events import ComputeFailed, Died, Event, Finished, Generate, Output
from server.engine.request import GenerationRequest, SamplingParams, TokenOutput
from server.engine.runner import ModelRunner
from server.engine.tokenizer import Tokenizer
from server.kernels.choice import choose_kernels
from server.model.loader import load_model
from server.model.state import state_components

from .measurement import BenchFailed, Prompt, Stream

PAGE_SIZE, N_PAGES, N_SLOTS = 256, 256, 32
EVENT_TIMEOUT_S = 300.0


class LocalEngine:
    """Computes prompts and decodes, as a decode node with ``--local-prefill`` does. Fp32, deterministic."""

    def __init__(self, checkpoint: Path, *, threads: int, spec_tokens: int = 0) -> None:
        draft = spec_tokens > 0
        kernels = choose_kernels("auto", "cpu")
        model = kernels.take(load_model(checkpoint, draft=draft))
        components = state_components(model.config, "float32", spec_tokens, draft=draft)
        window = model.config.sliding_window
        geometry = CacheGeometry(PAGE_SIZE, N_PAGES + 1, N_SLOTS + 1, window, spec_tokens, components)
        self.arena, self.tokenizer = Arena(ArenaLayout.from_geometry(geometry)), Tokenizer.load(checkpoint)
        self._allocator, self._spec_tokens = Allocator(geometry), spec_tokens
        self._events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._engine = Engine(
            ModelRunner(model, self.arena),
            self.tokenizer,
            lambda event: self._events.put((time.perf_counter(), event)),
            threads=threads,
            spec_tokens=spec_tokens,
            sample_kernel=kernels.sampler(threads),
        )
        self._engine.start()

    def close(self) -> None:
        self._engine.stop()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, at_once: int | None = None
    ) -> Iterator[tuple[float, int, TokenOutput]]:
        """Runs all prompts, at most ``at_once`` of them side by side: the time of each output, whose it is, and it.

        Raises :class:`BenchFailed`.
        """
        waiting = deque(enumerate(prompts))
        n_running = 0
        while waiting or n_running:
            while waiting and n_running < (at_once or len(prompts)):
                key, prompt = waiting.popleft()
                placement = self._reserve(key, len(prompt) + sampling.max_tokens + self._spec_tokens)
                self._engine.submit(Generate(key, GenerationRequest(str(key), prompt, sampling), placement))
                n_running += 1
            at, event = self._events.get(timeout=EVENT_TIMEOUT_S)
            match event:
                case Output(int(key), output):
                    yield at, key, output
                case Finished(int(key)):
                    self._allocator.release(key)
                    n_running -= 1
                case ComputeFailed(_, failure):
                    raise BenchFailed(f"the engine failed: {failure.reason}")
                case Died(message):
                    raise BenchFailed(f"the engine died: {message}")

    def decode(self, prompts: Sequence[Prompt], n_tokens: int) -> list[Stream]:
        """All prompts submitted at once; the stream of each."""
        streams = [Stream() for _ in prompts]
        for at, key, output in self.generate(prompts, SamplingParams(max_tokens=n_tokens, ignore_eos=True)):
            streams[key].add(at, streams[key].n_tokens + len(output.token_ids))
        return streams

    def prefill_s(self, prompt: Prompt) -> float:
        """Seconds from the prompt to its first token."""
        started = time.perf_counter()
        return self.decode([prompt], 1)[0].times_s[0] - started

    def digest_s(self, n: int) -> float:
        """Seconds of one digest pass over the live bytes of ``n`` prompt tokens, the pass that each node takes once."""
        placement = self._reserve("digest", n)
        started = time.perf_counter()
        live_digests(self.arena, n, placement)
        elapsed_s = time.perf_counter() - started
        self._allocator.release("digest")
        return elapsed_s

    def _reserve(self, key: int | str, n_tokens: int) -> Placement:
        if (placement := self._allocator.reserve(key, n_tokens)) is None:
            raise BenchFailed(f"{n_tokens} more tokens do not fit the pools")
        return placement
