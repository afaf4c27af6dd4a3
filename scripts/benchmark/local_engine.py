"""This project's engine thread in this process, built as a decode node with ``--local-prefill`` builds it."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from server.cache.layout import Placement
from server.decode.launch import PROG
from server.decode.options import DecodeOptions
from server.engine.events import ComputeFailed, Died, Event, Finished, Generate, Output
from server.engine.request import GenerationRequest, SamplingParams, TokenOutput
from server.node.build import build_resources
from server.node.cli import parse

from .measurement import BenchFailed, Prompt, Stream

EVENT_TIMEOUT_S = 600.0


def kernels_can_be_chosen() -> bool:
    """Whether nodes have an option ``--kernels``."""
    return any(field.name == "kernels" for field in fields(DecodeOptions))


def kernel_options(kernels: str | None) -> tuple[str, ...]:
    """The words of a command line that choose ``kernels``; none for None, which is the node's own choice."""
    return ("--kernels", kernels) if kernels is not None and kernels_can_be_chosen() else ()


class LocalEngine:
    """Computes prompts and decodes in a thread of this process."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        threads: int,
        spec_tokens: int = 0,
        dtype: str = "float32",
        kernels: str | None = None,
        pages: int = 256,
        slots: int = 32,
        more: Sequence[str] = (),
    ) -> None:
        """``more``: further words of a node's command line."""
        sizes = ("--threads", threads, "--pages", pages, "--slots", slots, "--spec-tokens", spec_tokens)
        words = ["--local-prefill", "--model", str(checkpoint), "--dtype", dtype, *map(str, sizes)]
        options = parse(DecodeOptions, PROG, "", [*words, *kernel_options(kernels), *more])
        resources = build_resources("decode", options, draft=spec_tokens > 0, spec_tokens=spec_tokens)
        self.tokenizer, self.layout = resources.tokenizer, resources.context.arena.layout
        self.model_config = resources.runner.model.config
        self.kernels: str = getattr(resources.context.identity, "kernels", "python")
        self._allocator, self._spec_tokens = resources.context.allocator, spec_tokens
        self._events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._engine = resources.engine(lambda event: self._events.put((time.perf_counter(), event)))
        self._engine.start()

    def close(self) -> None:
        self._engine.stop(EVENT_TIMEOUT_S)

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
            try:
                at, event = self._events.get(timeout=EVENT_TIMEOUT_S)
            except queue.Empty:
                raise BenchFailed(f"the engine said nothing for {EVENT_TIMEOUT_S:g} s") from None
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

    def _reserve(self, key: int, n_tokens: int) -> Placement:
        if (placement := self._allocator.reserve(key, n_tokens)) is None:
            raise BenchFailed(f"{n_tokens} more tokens do not fit the pools")
        return placement
