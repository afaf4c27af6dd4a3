"""One run: what it may use, how large its measurements are, and how variants take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from evaluation.questions import BUNDLED, completion_prompt, load_problems

from server.engine.tokenizer import Tokenizer

from .checkpoints import Checkpoints
from .measurement import Measurement, Prompt

if TYPE_CHECKING:
    from .servers import Server

T = TypeVar("T")

LEAST_PROMPT = 8
WARM_UP_SHARE = 0.25
"""A first round that took more than this share of a measurement's time counts: a second one would be too dear."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    ``rounds`` and ``seconds`` bound one measurement; slow variants do fewer rounds, or are left out with a note.
    ``round_s`` is about how long one variant decodes in one round. Lengths are in tokens; ``batch_prompts`` bounds all
    prompts of one batch together, so that most of a round is decoding.
    """

    rounds: int = 7
    seconds: float = 8.0
    round_s: float = 0.25
    batches: tuple[int, ...] = (1, 4, 16, 64)
    decode_prompt: int = 64
    batch_prompts: int = 256
    most_decode_tokens: int = 256
    most_http_tokens: int = 1024
    prefill: tuple[int, ...] = (512, 2048, 8000)
    ttft: tuple[int, ...] = (128, 512, 2048, 8000)
    handoff: tuple[int, ...] = (512, 2048)
    flash: tuple[int, ...] = (512, 4096, 16384)
    growth: tuple[int, ...] = (512, 2048, 8192, 16384, 32768)
    itl_streams: int = 8
    itl_prompt: int = 4096
    itl_window_s: float = 4.0
    questions: int = 24
    most_drafts: int = 3
    shared_prefix: int = 4096
    suffix: int = 64
    chat_turns: int = 10
    chat_question: int = 256
    chat_answer: int = 128
    fresh_prompt: int = 2048
    fresh_answers: int = 512
    overhead_rounds: int = 20


QUICK = Sizes(
    rounds=1,
    seconds=1.0,
    round_s=0.05,
    batches=(1, 2),
    decode_prompt=16,
    batch_prompts=32,
    most_decode_tokens=16,
    most_http_tokens=64,
    prefill=(64,),
    ttft=(64,),
    handoff=(64,),
    flash=(64,),
    growth=(64, 128),
    itl_streams=2,
    itl_prompt=300,
    itl_window_s=0.3,
    questions=8,
    most_drafts=1,
    shared_prefix=512,
    chat_turns=3,
    fresh_prompt=300,
    fresh_answers=64,
    overhead_rounds=1,
)


@dataclass(frozen=True)
class Session:
    """What every part gets. ``baseline`` is a checkout of another commit whose servers are measured beside these.

    ``on_step`` is called with a measurement's name before every round. ``servers`` are those that several parts use,
    once they are started; ``stack`` ends them.
    """

    sizes: Sizes
    threads: int
    checkpoints: Checkpoints
    baseline: Path | None
    on_step: Callable[[str], None]
    prompts: Prompts
    stack: ExitStack
    servers: dict[str, Server] = field(default_factory=dict)

    def measure(self, measurement: Measurement, one_round: Callable[[Measurement], None]) -> Measurement:
        """Rounds of all variants in turn, until there are enough or the time is used up. The first one warms up."""
        sizes = self.sizes
        started = time.monotonic()
        self.on_step(measurement.name)
        first = replace(measurement, values={})
        one_round(first)
        took_s = time.monotonic() - started
        if took_s > WARM_UP_SHARE * sizes.seconds:
            measurement.values |= first.values
        while not measurement.values or (
            max(map(len, measurement.values.values())) < sizes.rounds
            and time.monotonic() - started + took_s < sizes.seconds
        ):
            self.on_step(measurement.name)
            one_round(measurement)
        return measurement

    def measure_prompts(
        self,
        measurement: Measurement,
        runs: Mapping[str, Callable[[], float]],
        n_tokens: int,
        pace: Pace,
        value: Callable[[float], float],
    ) -> Measurement:
        """Variants that each compute a prompt of ``n_tokens`` and return its seconds; ``value`` is what is reported.

        Those that would take too long get a note instead.
        """
        possible = pace.possible(measurement, runs, n_tokens)

        def one_round(m: Measurement) -> None:
            for name, run in possible.items():
                seconds = run()
                pace.took(name, n_tokens, seconds)
                m.add(name, value(seconds))

        return self.measure(measurement, one_round) if possible else measurement


class Prompts:
    """Token ids of the bundled questions, of any length."""

    def __init__(self, bundled: Path) -> None:
        tokenizer = Tokenizer.load(bundled)
        problems = load_problems(BUNDLED / "train.jsonl")
        self._ids = [i for p in problems for i in tokenizer.encode(completion_prompt(p, [p]) + "\n\n")]

    def one(self, n_tokens: int, start: int = 0) -> Prompt:
        return tuple(islice(cycle(self._ids), start, start + n_tokens))

    def for_decoding(self, batch: int, sizes: Sizes) -> list[Prompt]:
        """Those of ``batch`` requests that decode side by side."""
        return self.many(batch, max(LEAST_PROMPT, min(sizes.decode_prompt, sizes.batch_prompts // batch)))

    def many(self, n: int, n_tokens: int) -> list[Prompt]:
        """``n`` different ones: no two begin at the same place."""
        return [self.one(n_tokens, i * len(self._ids) // n) for i in range(n)]


class Pace:
    """How long variants take, learnt from the sizes that were measured, so that none is begun that would not end.

    ``limit_s`` bounds one prompt; ``most`` are lengths in tokens beyond which a variant is not tried at all.
    """

    def __init__(self, limit_s: float, most: Mapping[str, int] | None = None) -> None:
        self._limit_s, self._most = limit_s, most or {}
        self._seconds_a_token: dict[str, float] = {}

    def took(self, variant: str, n_tokens: int, seconds: float) -> None:
        self._seconds_a_token[variant] = seconds / n_tokens

    def reason_against(self, variant: str, n_tokens: int) -> str | None:
        """Why ``variant`` is not tried with ``n_tokens``; None if it is."""
        if n_tokens > (most := self._most.get(variant, n_tokens)):
            return f"not measured beyond {most:,} tokens"
        expected_s = self._seconds_a_token.get(variant, 0.0) * n_tokens
        if expected_s > self._limit_s:
            return f"not measured: {n_tokens:,} tokens would take {expected_s:.0f} s or more; see --seconds"
        return None

    def possible(self, measurement: Measurement, variants: Mapping[str, T], n_tokens: int) -> dict[str, T]:
        """Those of ``variants`` that are tried with ``n_tokens``; ``measurement`` gets a note for every other."""
        reasons = {name: self.reason_against(name, n_tokens) for name in variants}
        measurement.notes |= {name: reason for name, reason in reasons.items() if reason is not None}
        return {name: variant for name, variant in variants.items() if reasons[name] is None}
