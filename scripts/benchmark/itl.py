"""Gaps between tokens of running streams while long prompts keep arriving: a pair against a node alone, same cores."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from .client import ANSWER_TIMEOUT_S, Answer, first_token, run_client
from .measurement import BenchFailed, Measurement, Prompt, percentile
from .servers import BASELINE, CORES, LOCAL, PD, Server, bundled_servers, same_cores
from .session import Session

STREAM_PROMPT, MOST_STREAM_TOKENS = 64, 7000
MOST_ROUNDS = 3
LEAST_PROMPTS = 2
"""Prompts that are computed while gaps are counted, however long that takes."""
CURVE = (*range(1, 100), 99.5, 99.9)
"""The percentiles that the report keeps of each variant's gaps, for the picture."""


def measure_itl(session: Session) -> Iterator[Measurement]:
    """p50 and p99 of the gaps, each round over all streams of one window; a second prompt follows the first at once."""
    sizes = session.sizes
    what = f"{sizes.itl_streams} streams, prompts of {sizes.itl_prompt:,} tokens arriving"
    ratios = ((PD, LOCAL), (PD, PD + BASELINE), (LOCAL, LOCAL + BASELINE))
    size = {"streams": sizes.itl_streams, "prompt_tokens": sizes.itl_prompt, "cores": CORES}
    p50, p99, rate = (
        Measurement("itl", f"inter-token latency, {name}, {what}", unit, ratios, size=size | {"figure": name})
        for name, unit in (("p50", "ms"), ("p99", "ms"), ("prompts", "prompts/s"))
    )
    gaps_s: dict[str, list[float]] = {}
    servers = bundled_servers(session)

    def one_round(m: Measurement) -> None:
        found = {name: run_client(_window(session, server)) for name, server in servers.items()}
        for name, (gaps, prompts_per_s) in found.items():
            m.add(name, 1e3 * percentile(gaps, 99))
            if m is p99:
                p50.add(name, 1e3 * percentile(gaps, 50))
                rate.add(name, prompts_per_s)
                gaps_s.setdefault(name, []).extend(gaps)

    with same_cores():
        session.on_step(p99.name)
        one_round(Measurement("itl", "warm-up", "ms"))
        for _ in range(min(MOST_ROUNDS, sizes.rounds)):
            session.on_step(p99.name)
            one_round(p99)
    p99.details["curve_percent"] = list(CURVE)
    p99.details["curve_ms"] = {
        name: [1e3 * percentile(gaps, percent) for percent in CURVE] for name, gaps in gaps_s.items()
    }
    yield from (p50, p99, rate)


async def _window(session: Session, server: Server) -> tuple[list[float], float]:
    """Gaps of all streams, seconds, while prompts arrive; and how many prompts were computed in a second."""
    sizes = session.sizes
    streams = [await Answer.connect(server.url) for _ in range(sizes.itl_streams)]
    try:
        for stream, prompt in zip(streams, session.prompts.many(len(streams), STREAM_PROMPT), strict=True):
            stream.ask(prompt, MOST_STREAM_TOKENS)
        for stream in streams:
            await first_token(stream, server.url)
        start = perf_counter()
        prompt, n_prompts = session.prompts.one(sizes.itl_prompt), 0
        while _goes_on(start, n_prompts, sizes.itl_window_s, streams):
            await _one_prompt(server, prompt)
            n_prompts += 1
        stop = perf_counter()
        ended = [stream.stream().times_s[-1] for stream in streams if stream.ended.is_set()]
    finally:
        for stream in streams:
            stream.leave()
    counted_until = min([stop, *ended])  # behind a stream's end the others are faster
    gaps = [gap for stream in streams for gap in stream.stream().gaps_s(start, counted_until)]
    if not gaps:
        raise BenchFailed(f"{server.url}: no stream got two tokens while {n_prompts} prompts were computed")
    return gaps, n_prompts / (stop - start)


def _goes_on(start: float, n_prompts: int, window_s: float, streams: list[Answer]) -> bool:
    elapsed_s = perf_counter() - start
    if elapsed_s > ANSWER_TIMEOUT_S or any(stream.ended.is_set() for stream in streams):
        return False
    return elapsed_s < window_s or n_prompts < LEAST_PROMPTS


async def _one_prompt(server: Server, prompt: Prompt) -> None:
    arriving = await Answer.connect(server.url)
    try:
        arriving.ask(prompt, 1)
        await first_token(arriving, server.url)
        arriving.stream()
    finally:
        arriving.leave()
