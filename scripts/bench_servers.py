"""What is measured through HTTP: a prefill/decode pair, and one node that does both, each in processes of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench_data import BenchFailed, Stream
from process_pair import Pair, Process, StopSignals, free_ports
from prometheus_client.parser import text_string_to_metric_families
from quickstart import BIN, HOST, LOGS, transfer_bytes, wait_ready

READY_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 300.0
NEWS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Handoff:
    """One request through the pair, seconds: the client's ``ttft_s``, and two phases as the prefill node measures them.

    ``transfer_s``: digests taken -> every piece applied. ``commit_s``: ``Done`` sent -> ``Committed`` received.
    """

    ttft_s: float
    transfer_s: float
    commit_s: float


class Servers:
    """URLs of three running nodes: the pair ``prefill`` and ``decode``, and ``local``, with ``--local-prefill``."""

    def __init__(self, client: httpx.Client, prefill: str, decode: str, local: str) -> None:
        self._client, self._prefill, self._decode, self._local = client, prefill, decode, local

    def decode_pair(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
        """All prompts asked of the pair at once; the stream of each."""
        return asyncio.run(_ask_all(self._decode, prompts, n_tokens))

    def ttft_local_s(self, prompt: Sequence[int]) -> float:
        return _ttft_s(self._local, prompt)

    def hand_off(self, prompt: Sequence[int], nbytes: int) -> Handoff:
        """One prompt through the pair. Raises :class:`BenchFailed` unless exactly ``nbytes`` of state moved for it."""
        before, moved_before = self._phases(), sum(transfer_bytes(self._client, self._decode).values())
        ttft_s = _ttft_s(self._decode, prompt)
        after = self._phases_after(before)
        moved = sum(transfer_bytes(self._client, self._decode).values()) - moved_before
        if moved != nbytes:
            raise BenchFailed(f"{moved} bytes were moved for {len(prompt)} prompt tokens, expected {nbytes}")
        return Handoff(ttft_s, after["transfer"][1] - before["transfer"][1], after["commit"][1] - before["commit"][1])

    def _phases_after(self, before: dict[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
        """The prefill node counts a room a moment after the decode node has answered."""
        deadline = time.monotonic() + NEWS_TIMEOUT_S
        while (after := self._phases())["commit"][0] != before["commit"][0] + 1:
            if time.monotonic() > deadline:
                raise BenchFailed("the prefill node did not count the room in pd_phase_seconds")
            time.sleep(0.02)
        return after

    def _phases(self) -> dict[str, tuple[int, float]]:
        """Count and sum of ``pd_phase_seconds`` of the prefill node, for the two phases of a hand-off."""
        text = self._client.get(f"{self._prefill}/metrics", timeout=5.0).raise_for_status().text
        found = {
            (sample.name, sample.labels["phase"]): sample.value
            for family in text_string_to_metric_families(text)
            if family.name == "pd_phase_seconds"
            for sample in family.samples
        }
        return {
            phase: (
                int(found.get(("pd_phase_seconds_count", phase), 0)),
                found.get(("pd_phase_seconds_sum", phase), 0.0),
            )
            for phase in ("transfer", "commit")
        }


@contextmanager
def running_servers(model: Path, threads: int, signals: StopSignals) -> Iterator[Servers]:
    """Starts the three nodes on free ports, waits until they are ready, and ends them on every way out.

    Raises :class:`process_pair.PairFailed` if one does not become ready.
    """
    bootstrap, *http = free_ports(4)
    common = ["--host", HOST, "--model", str(model), "--threads", str(threads), "--log-level", "warning"]
    roles = {
        "prefill": ["launch_prefill", "--bootstrap-port", str(bootstrap)],
        "decode": ["launch_decode", "--prefill", f"{HOST}:{bootstrap}"],
        "local": ["launch_decode", "--local-prefill"],
    }
    LOGS.mkdir(exist_ok=True)
    processes = [
        Process(role, [str(BIN / command), *rest, *common, "--port", str(port)], LOGS / f"bench-{role}-{port}.log")
        for (role, (command, *rest)), port in zip(roles.items(), http, strict=True)
    ]
    prefill, decode, local = (f"http://{HOST}:{port}" for port in http)
    pair = Pair(processes, signals)
    with ExitStack() as stack:
        stack.callback(pair.stop)
        client = stack.enter_context(httpx.Client(trust_env=False))
        pair.start()
        wait_ready(pair, client, prefill, decode, READY_TIMEOUT_S)
        wait_ready(pair, client, local, local, READY_TIMEOUT_S)
        yield Servers(client, prefill, decode, local)


def _ttft_s(url: str, prompt: Sequence[int]) -> float:
    """Seconds from sending the request to its first token, on a connection that is open already."""
    (stream,) = asyncio.run(_ask_all(url, [prompt], 1))
    return stream.times_s[0]


async def _ask_all(url: str, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(client.get("/health") for _ in prompts))
        started = time.perf_counter()
        return await asyncio.gather(*(_ask(client, prompt, n_tokens, started) for prompt in prompts))


async def _ask(client: httpx.AsyncClient, prompt: Sequence[int], n_tokens: int, started: float) -> Stream:
    """One streamed completion; times count from ``started``."""
    body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    stream = Stream()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise BenchFailed(f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise BenchFailed(f"the answer ended in an error: {event['error']}")
            stream.add(time.perf_counter() - started, event["usage"]["completion_tokens"])
    if not stream.counts or stream.counts[-1] != n_tokens:
        raise BenchFailed(f"an answer has {stream.counts[-1] if stream.counts else 0} tokens, expected {n_tokens}")
    return stream


__all__ = ["Handoff", "Servers", "running_servers"]
