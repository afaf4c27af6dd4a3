"""What a client of the servers sees: decode rates, the time to the first token, and how both grow with the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from . import client
from .in_process import TRANSFORMERS, Decode, decode_round, requests, tokens_of_each
from .measurement import Measurement, Prompt
from .reference import Transformers
from .servers import BASELINE, LOCAL, PD, Server, bundled_servers
from .session import Pace, Session

PATIENCE = 4
"""Times --seconds for one prompt of growth: the longest is measured once rather than not at all."""
STEPS_OF_GROWTH = 24
"""Tokens that are decoded behind a long prompt, to know a step's time."""


def measure_http(session: Session) -> Iterator[Measurement]:
    sizes = session.sizes
    variants: dict[str, Decode] = {TRANSFORMERS: Transformers(session.checkpoints.path("bundled")).decode}
    for server_name, server in bundled_servers(session).items():
        variants[server_name] = partial(client.decode, server.url)
    for batch in sizes.batches:
        name = f"decode over HTTP, bundled, {requests(batch)}"
        session.on_step(name)
        prompts = session.prompts.for_decoding(batch, sizes)
        n_tokens = tokens_of_each(variants, prompts, sizes.round_s, sizes.most_http_tokens)
        m = Measurement(
            "http",
            name,
            "tokens/s",
            ((PD, LOCAL), (PD, TRANSFORMERS), (LOCAL, TRANSFORMERS), (PD, PD + BASELINE), (LOCAL, LOCAL + BASELINE)),
            size={"checkpoint": "bundled", "dtype": "float32", "requests": batch, "tokens": n_tokens}
            | {"prompt_tokens": len(prompts[0])},
        )
        yield session.measure(m, partial(decode_round, variants, prompts, n_tokens))


def measure_ttft(session: Session) -> Iterator[Measurement]:
    pace = Pace(session.sizes.seconds)
    servers = bundled_servers(session)
    for n in session.sizes.ttft:
        m = Measurement(
            "ttft",
            f"time to the first token, bundled, {n:,} tokens",
            "ms",
            ((PD, LOCAL), (PD, PD + BASELINE), (LOCAL, LOCAL + BASELINE)),
            ((PD, LOCAL), (PD + BASELINE, LOCAL + BASELINE)),
            size={"checkpoint": "bundled", "tokens": n},
        )
        prompt = session.prompts.one(n)
        runs = {name: partial(client.ttft_s, server.url, prompt) for name, server in servers.items()}
        yield session.measure_prompts(m, runs, n, pace, lambda seconds: 1e3 * seconds)


def measure_growth(session: Session) -> Iterator[Measurement]:
    """One measurement for each length, of the time to the first token; bytes and step times are its details."""
    pace = Pace(PATIENCE * session.sizes.seconds)
    servers = bundled_servers(session)
    for n in session.sizes.growth:
        m = Measurement(
            "growth",
            f"growth, {n:,} tokens: time to the first token",
            "ms",
            ((PD, LOCAL), (PD, PD + BASELINE)),
            ((PD, LOCAL),),
            size={"checkpoint": "bundled", "tokens": n},
        )
        prompt = session.prompts.one(n)
        steps_s: dict[str, list[float]] = {name: [] for name in servers}
        runs: dict[str, Callable[[], float]] = {
            name: partial(_ttft_and_steps, server, prompt, steps_s[name]) for name, server in servers.items()
        }
        before = servers[PD].moved()
        session.measure_prompts(m, runs, n, pace, lambda seconds: 1e3 * seconds)
        if steps_s[PD]:
            m.details["moved_nbytes"] = (servers[PD].moved() - before) // len(steps_s[PD])
        m.details["step_ms"] = {name: 1e3 * median(found) for name, found in steps_s.items() if found}
        yield m


def _ttft_and_steps(server: Server, prompt: Prompt, steps_s: list[float]) -> float:
    """Seconds to the first token; the mean time of each following one is added to ``steps_s``."""
    (stream,) = client.decode(server.url, [prompt], STEPS_OF_GROWTH)
    steps_s.append((stream.times_s[-1] - stream.times_s[0]) / (stream.n_tokens - stream.counts[0]))
    return stream.times_s[0]
