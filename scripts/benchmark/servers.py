"""What is measured through HTTP: a prefill/decode pair, and one node that does both, each in processes of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cluster import LOGS, Cluster, Node, Pair, until
from cluster.asking import EarlyEnd, RequestError, events_of

from .measurement import BenchFailed, Prompt, Stream

READY_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 300.0
COUNTED_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Handoff:
    """One request through the pair, seconds: the client's ``ttft_s``, and two phases as the prefill node measures them.

    ``transfer_s``: digests taken -> every piece applied. ``commit_s``: ``Done`` sent -> ``Committed`` received.
    """

    ttft_s: float
    transfer_s: float
    commit_s: float


class Servers:
    """Three running nodes: a pair, and ``local``, with ``--local-prefill``."""

    def __init__(self, pair: Pair, local: Node) -> None:
        self._prefill, self._decode, self._local = pair.p, pair.d, local

    def decode_pair(self, prompts: Sequence[Prompt], n_tokens: int) -> list[Stream]:
        """All prompts asked of the pair at once; the stream of each."""
        return asyncio.run(_ask_all(self._decode.url, prompts, n_tokens))

    def ttft_local_s(self, prompt: Prompt) -> float:
        return _ttft_s(self._local.url, prompt)

    def hand_off(self, prompt: Prompt, nbytes: int) -> Handoff:
        """One prompt through the pair. Raises :class:`BenchFailed` unless exactly ``nbytes`` of state moved for it."""
        n_before, seconds_before, moved_before = self._n_committed(), self._seconds(), self._moved()
        ttft_s = _ttft_s(self._decode.url, prompt)
        try:  # the prefill node counts a room a moment after the decode node has answered
            until(lambda: self._n_committed() == n_before + 1, COUNTED_TIMEOUT_S, "the room is in pd_phase_seconds")
        except TimeoutError as error:
            raise BenchFailed(f"the prefill node: {error}") from error
        if (moved := self._moved() - moved_before) != nbytes:
            raise BenchFailed(f"{moved} bytes were moved for {len(prompt)} prompt tokens, expected {nbytes}")
        transfer_s, commit_s = (after - before for after, before in zip(self._seconds(), seconds_before, strict=True))
        return Handoff(ttft_s, transfer_s, commit_s)

    def _moved(self) -> int:
        return sum(self._decode.transfer_bytes().values())

    def _n_committed(self) -> float:
        return self._prefill.samples("pd_phase_seconds_count").get(("commit",), 0.0)

    def _seconds(self) -> tuple[float, float]:
        """Sums of ``pd_phase_seconds`` for the two phases of a hand-off, transfer and commit."""
        sums = self._prefill.samples("pd_phase_seconds_sum")
        return sums.get(("transfer",), 0.0), sums.get(("commit",), 0.0)


@contextmanager
def running_servers(model: Path, threads: int) -> Iterator[Servers]:
    """The three nodes, ready; ended on every way out. Raises :class:`cluster.ClusterFailed`."""
    common = ("--model", str(model), "--threads", str(threads), "--log-level", "warning")
    pair = Pair(LOGS, common, common, prefix="bench-")
    local = Node("decode", LOGS / "bench-local.log", "--local-prefill", *common, name="local")
    with Cluster([*pair.nodes, local]).running(READY_TIMEOUT_S):
        yield Servers(pair, local)


def _ttft_s(url: str, prompt: Prompt) -> float:
    """Seconds from sending the request to its first token, on a connection that is open already."""
    (stream,) = asyncio.run(_ask_all(url, [prompt], 1))
    return stream.times_s[0]


async def _ask_all(url: str, prompts: Sequence[Prompt], n_tokens: int) -> list[Stream]:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(client.get("/health") for _ in prompts))
        started = time.perf_counter()
        return await asyncio.gather(*(_ask(client, prompt, n_tokens, started) for prompt in prompts))


async def _ask(client: httpx.AsyncClient, prompt: Prompt, n_tokens: int, started: float) -> Stream:
    """One streamed completion; times count from ``started``."""
    body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    stream = Stream()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for event in events_of(response):
                stream.add(time.perf_counter() - started, event["usage"]["completion_tokens"])
    except (RequestError, EarlyEnd) as error:
        raise BenchFailed(str(error)) from error
    if stream.n_tokens != n_tokens:
        raise BenchFailed(f"an answer has {stream.n_tokens} tokens, expected {n_tokens}")
    return stream
