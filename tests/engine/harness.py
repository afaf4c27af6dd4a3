"""A real engine over a real model, whose events are collected."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from server.cache.layout import Placement
from server.engine.engine import Engine
from server.engine.events import ComputeFailed, Event, Finished, Generate, Output, PrefillFinished
from server.engine.request import GenerationRequest
from server.engine.tokenizer import Tokenizer
from server.kernels.choice import choose_kernels
from server.model.interface import LoadedModel
from tests.support.runners import make_runner

TIMEOUT_S = 60.0


class Harness:
    """An engine with ``k`` draft tokens a step, over poisoned memory."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        k: int = 0,
        *,
        cold: bool = False,
        chunk_tokens: int = 64,
        digest_pages: bool = False,
        kv_dtype: str = "model",
        index_dtype: str = "auto",
    ) -> None:
        runner = make_runner(model, spec_tokens=k, pages=60, kv_dtype=kv_dtype, index_dtype=index_dtype)
        self.runner, self.arena = runner, runner.arena
        self.events: queue.Queue[Event] = queue.Queue()
        self.engine = Engine(
            runner,
            tokenizer,
            self.events.put,
            chunk_tokens=chunk_tokens,
            spec_tokens=k,
            cold_draft=cold,
            sample_kernel=choose_kernels("auto", "cpu").sampler(1),
            digest_pages=digest_pages,
        )
        self.engine.start()

    def until(self, kind: type, key: object) -> list[Event]:
        """Every event up to the first of ``kind`` for ``key``."""
        seen = []
        while True:
            event = self.events.get(timeout=TIMEOUT_S)
            seen.append(event)
            if isinstance(event, kind) and getattr(event, "key", None) == key:
                return seen

    def finish(self, keys: Sequence[object]) -> list[Event]:
        """Every event until all of ``keys`` have ended."""
        open_keys, seen = set(keys), []
        while open_keys:
            event = self.events.get(timeout=TIMEOUT_S)
            seen.append(event)
            if isinstance(event, Finished | ComputeFailed | PrefillFinished):
                open_keys.discard(event.key)
        return seen

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Event]:
        """Every event of requests that run together."""
        for i, r in enumerate(requests):
            self.engine.submit(Generate(r.request_id, r, Placement(i + 1, (3 * i + 3, 3 * i + 1, 3 * i + 2))))
        return self.finish([r.request_id for r in requests])


def outputs_of(events: Sequence[Event], key: object) -> list[Output]:
    return [event for event in events if isinstance(event, Output) and event.key == key]


def tokens_of(events: Sequence[Event], key: object) -> list[int]:
    return [token for event in outputs_of(events, key) for token in event.output.token_ids]
