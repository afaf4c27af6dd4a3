"""Time per output token with k draft tokens against plain decoding: the bundled questions, in this process.

Over HTTP several tokens of these short answers come in one read, so that their times would say little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

from evaluation.questions import STOP, bundled_questions

from server.engine.request import SamplingParams

from .local_engine import LocalEngine
from .measurement import BenchFailed, Measurement, Prompt, Stream
from .session import Session

SAMPLING = SamplingParams(max_tokens=64, stop=STOP)


def measure_speculation(session: Session) -> Iterator[Measurement]:
    """One engine for every k. ``details`` have the accept length of each."""
    with ExitStack() as stack:
        engines = {
            f"k = {k}": stack.enter_context(
                closing(
                    LocalEngine(session.checkpoints.path("bundled"), threads=session.threads, spec_tokens=k, slots=16)
                )
            )
            for k in range(session.sizes.most_drafts + 1)
        }
        plain, *drafting = engines
        tokenizer = engines[plain].tokenizer
        prompts = [tuple(tokenizer.encode(text)) for _, text in bundled_questions()[: session.sizes.questions]]
        lengths: dict[str, float] = {}
        m = Measurement(
            "speculation",
            "time per output token, bundled questions, 1 at once",
            "ms",
            tuple((name, plain) for name in drafting),
            size={"checkpoint": "bundled", "requests": 1, "questions": len(prompts)},
            details={"accept_length": lengths},
        )
        yield session.measure(m, partial(_round, engines, prompts, lengths))


def _round(
    engines: Mapping[str, LocalEngine], prompts: Sequence[Prompt], lengths: dict[str, float], m: Measurement
) -> None:
    """Each engine answers every prompt; what counts is the time from an answer's first token to its last."""
    for name, engine in engines.items():
        seconds, n_tokens, n_steps, n_accepted = 0.0, 0, 0, 0
        for prompt in prompts:
            stream = Stream()
            for at, _, output in engine.generate([prompt], SAMPLING):
                stream.add(at, stream.n_tokens + len(output.token_ids))
                n_steps += output.n_proposed > 0
                n_accepted += output.n_accepted
            if stream.n_tokens:
                seconds += stream.times_s[-1] - stream.times_s[0]
                n_tokens += stream.n_tokens - stream.counts[0]
        if not n_tokens:
            raise BenchFailed(f"{name}: no answer has two tokens")
        m.add(name, 1e3 * seconds / n_tokens)
        lengths[name] = 1 + n_accepted / n_steps if n_steps else 1.0
