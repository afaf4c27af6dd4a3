"""A streaming client for one OpenAI-compatible endpoint that measures what it receives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from cluster.asking import EarlyEnd, RequestError, events_of

from .questions import STOP

ANSWER_TIMEOUT_S = 120.0
PROBE_TIMEOUT_S = 5.0
PROBE_TRIES = 4


class ServerDied(Exception):
    """The endpoint cannot be reached (any more)."""


@dataclass
class Answer:
    """One answer and its clock: times in seconds since the request was sent.

    ``draft_steps`` and ``accepted`` are the server's counts of speculative steps and accepted drafts (0 without them).
    """

    text: str = ""
    error: str | None = None
    finish_reason: str | None = None
    prefill: str | None = None
    room: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    draft_steps: int = 0
    accepted: int = 0
    chunk_times_s: list[float] = field(default_factory=list)
    n_together: int = 0
    """Chunks with text that were read at once with the one before: between them no time can be measured."""
    total_s: float = 0.0

    def add(self, event: dict[str, Any], now_s: float, *, is_together: bool = False) -> str:
        """Takes one event of the stream; its text. ``is_together``: it was read at once with the event before."""
        text = ""
        for choice in event.get("choices") or []:
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.text += text
            self.n_together += is_together and bool(self.chunk_times_s)
            self.chunk_times_s.append(now_s)
        # what the head of the stream could not say yet, if it went out before the prompt was computed
        pd = event.get("pd") or {}
        self.prefill, self.room = pd.get("prefill") or self.prefill, pd.get("room") or self.room
        if usage := event.get("usage"):
            drafts = usage.get("completion_tokens_details") or {}
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.completion_tokens = int(usage.get("completion_tokens") or 0)
            self.draft_steps = int(drafts.get("draft_steps") or 0)
            self.accepted = int(drafts.get("accepted_prediction_tokens") or 0)
        return text

    @property
    def ttft_s(self) -> float | None:
        """Time to the first chunk with text."""
        return self.chunk_times_s[0] if self.chunk_times_s else None

    @property
    def has_intervals(self) -> bool:
        """Whether there is more than one chunk with text."""
        return len(self.chunk_times_s) > 1

    @property
    def intervals_are_known(self) -> bool:
        """Whether they can be measured. Where most chunks are read together, server or client come late, and between
        them lies only the time to read them.
        """
        return self.has_intervals and 2 * self.n_together < len(self.chunk_times_s) - 1

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None where it is not known."""
        if self.completion_tokens < 2 or not self.intervals_are_known:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.completion_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between chunks with text (one chunk may carry several tokens), where they are known."""
        if not self.intervals_are_known:
            return ()
        return tuple(b - a for a, b in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False))


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Mean tokens of a speculative step, 1 + accepted drafts; None if the server did not speculate."""
    steps = sum(answer.draft_steps for answer in answers)
    return 1 + sum(answer.accepted for answer in answers) / steps if steps else None


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask. ``base_url`` with or without a trailing ``/v1``; ``timeout_s`` bounds one whole request."""

    base_url: str
    api: str
    model: str | None
    max_tokens: int
    stop: tuple[str, ...]
    timeout_s: float
    api_key: str | None = None

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        return f"{self.root}/v1/{'completions' if self.api == 'completions' else 'chat/completions'}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: str | list[dict[str, str]]) -> dict[str, Any]:
        """A greedy streaming request for ``prompt``: a text, or chat messages."""
        return {
            "model": self.model,
            ("prompt" if self.api == "completions" else "messages"): prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stop": list(self.stop),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def first_model(client: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """The endpoint's first model id. Raises :class:`ServerDied` when nothing answers."""
    try:
        response = await client.get(f"{endpoint.root}/v1/models", timeout=PROBE_TIMEOUT_S)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise ServerDied(f"{endpoint.root} does not answer: {_reason(error)}") from error
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerDied(f"{endpoint.root}/v1/models is not an OpenAI model list: {_reason(error)}") from error


async def ask_all(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    prompts: Sequence[str | list[dict[str, str]]],
    concurrency: int,
    on_answer: Callable[[int, Answer], None],
) -> list[Answer]:
    """Asks every prompt with at most ``concurrency`` in flight; answers in the order of ``prompts``.

    A failed request is an :class:`Answer` with an ``error``. Raises :class:`ServerDied` once the endpoint is gone.
    """
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))

    async def worker() -> None:
        for index, prompt in waiting:
            answers[index] = await ask(client, endpoint, prompt)
            on_answer(index, answers[index])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(worker())
    except* ServerDied as died:
        raise died.exceptions[0] from None
    return [answers[index] for index in range(len(prompts))]


def ask_bundled_model(
    url: str, prompts: Sequence[str], concurrency: int, max_tokens: int = 64, stop: tuple[str, ...] = STOP
) -> list[Answer]:
    """Answers of a node that serves the bundled model. Raises :class:`ServerDied`."""
    endpoint = Endpoint(url, "completions", "tiny-dsv4", max_tokens, stop, ANSWER_TIMEOUT_S)

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            return await ask_all(client, endpoint, prompts, concurrency, lambda index, answer: None)

    return asyncio.run(run())


async def ask(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    prompt: str | list[dict[str, str]],
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Asks once and reads the stream to its end; ``on_text`` gets its texts as they come."""
    started = time.perf_counter()
    answer = Answer()
    try:
        async with (
            asyncio.timeout(endpoint.timeout_s),
            client.stream("POST", endpoint.url, json=endpoint.body(prompt), headers=endpoint.headers) as response,
        ):
            answer.prefill, answer.room = response.headers.get("x-pd-prefill"), response.headers.get("x-pd-room")
            n_read = 0
            async for event in events_of(response):
                n_read, n_before = response.num_bytes_downloaded, n_read
                if text := answer.add(event, time.perf_counter() - started, is_together=n_read == n_before):
                    on_text(text)
    except TimeoutError:
        answer.error = f"no complete answer within {endpoint.timeout_s:g} s"
    except (RequestError, EarlyEnd) as failed:
        answer.error = str(failed)
    except httpx.TransportError as lost:
        answer.error = f"connection lost: {_reason(lost)}"
        await _check_alive(client, endpoint, answer.error)
    answer.completion_tokens = answer.completion_tokens or len(answer.chunk_times_s)
    answer.total_s = time.perf_counter() - started
    return answer


async def _check_alive(client: httpx.AsyncClient, endpoint: Endpoint, after: str) -> None:
    """One lost connection may be an accident: raises :class:`ServerDied` if nothing listens there any more."""
    for attempt in range(PROBE_TRIES):
        try:
            await client.get(f"{endpoint.root}/v1/models", timeout=PROBE_TIMEOUT_S)
        except httpx.TransportError as error:
            last = _reason(error)
            await asyncio.sleep(0.25 * attempt)
        else:
            return
    raise ServerDied(f"{endpoint.root} died during the run ({after}; then {PROBE_TRIES} times: {last})")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
