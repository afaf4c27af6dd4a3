"""How many drafted tokens are accepted: the bundled questions through the real engine, in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmark.local_engine import LocalEngine
from evaluation.questions import STOP, bundled_questions

from server.engine.request import SamplingParams

MOST_NEW_TOKENS = 64
N_AT_ONCE = 8


@dataclass(frozen=True)
class Acceptance:
    """`steps` holds how many of its drafted tokens were accepted for every engine step that drafted all k."""

    k: int
    steps: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens that a step yields: one of the target's own and the drafts before it."""
        return 1 + sum(self.steps) / len(self.steps)

    @property
    def shares(self) -> tuple[float, ...]:
        """How often at least 1, 2, ... drafted tokens of a step are accepted."""
        return tuple(sum(n > i for n in self.steps) / len(self.steps) for i in range(self.k))


def measure(checkpoint: Path, k: int, n_questions: int, threads: int) -> Acceptance:
    """Asks the first `n_questions` bundled ones greedily, in the prompts of scripts/gsm8k.py."""
    engine = LocalEngine(checkpoint, threads=threads, spec_tokens=k)
    prompts = [tuple(engine.tokenizer.encode(prompt)) for _, prompt in bundled_questions()[:n_questions]]
    sampling = SamplingParams(max_tokens=MOST_NEW_TOKENS, stop=STOP)
    try:
        outputs = [output for _, _, output in engine.generate(prompts, sampling, N_AT_ONCE)]
    finally:
        engine.close()
    return Acceptance(k, tuple(output.n_accepted for output in outputs if output.n_proposed == k))
