"""A client that costs little: what comes is noted with its time, and read when everything is there."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any, TypeVar, cast

import uvloop

from server.transfer.addresses import split_address

from .measurement import BenchFailed, Prompt, Stream

ANSWER_TIMEOUT_S = 600.0

T = TypeVar("T")


def run_client(client: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(client)


class Answer(asyncio.Protocol):
    """One streamed completion on a connection of its own."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.ended = asyncio.Event()
        self.usage: dict[str, Any] = {}
        """The last one that :meth:`stream` has read."""
        self._pieces: list[tuple[float, bytes]] = []
        self._transport: asyncio.WriteTransport

    @staticmethod
    async def connect(url: str) -> Answer:
        """Raises :class:`BenchFailed`."""
        host, port = split_address(url.removeprefix("http://"))
        try:
            _, answer = await asyncio.get_running_loop().create_connection(Answer, host, port)
        except OSError as error:
            raise BenchFailed(f"{url} cannot be reached: {error}") from error
        return answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((perf_counter(), data))
        if not self.first.is_set() and b"data:" in data:
            self.first.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.first.set()
        self.ended.set()

    def ask(self, prompt: Prompt | str, n_tokens: int, *, stop: Sequence[str] | None = None) -> float:
        """Sends the request, greedy and of exactly ``n_tokens``, or of at most so many with ``stop``; the time."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0}
        body |= {"ignore_eos": True} if stop is None else {"stop": stop}
        body |= {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        content = json.dumps(body, separators=(",", ":")).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        at = perf_counter()
        self._transport.write(head.encode() + content)
        return at

    def leave(self) -> None:
        """Goes away; the server ends the generation."""
        self._transport.abort()

    def stream(self) -> Stream:
        """When tokens came, so far. Raises :class:`BenchFailed` for an answer that is an error."""
        raw = b"".join(data for _, data in self._pieces)
        ends, times, n = [], [], 0
        for at, data in self._pieces:
            n += len(data)
            ends.append(n)
            times.append(at)
        stream = Stream()
        for end, event in _events(raw):
            self.usage = event["usage"]
            stream.add(times[bisect_left(ends, end)], self.usage["completion_tokens"])
        return stream


def _events(raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    """The events of an answer, each with where in ``raw`` the chunk that completes it ends."""
    head, separator, body = raw.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    if b" 200 " not in status:
        raise BenchFailed(f"answered {status.decode('latin-1')!r}: {body[:300].decode('utf-8', 'replace')}")
    events, at, text = [], len(head) + len(separator), b""
    while (line_end := raw.find(b"\r\n", at)) > 0:
        size = int(raw[at:line_end], 16)
        at = line_end + 2 + size + 2
        if not size or at > len(raw):
            break
        text += raw[line_end + 2 : at - 2]
        *whole, text = text.split(b"\n\n")
        for event in whole:
            if not event.startswith(b"data: {"):
                continue  # a comment, or [DONE]
            content = json.loads(event.removeprefix(b"data: "))
            if "error" in content:
                raise BenchFailed(f"an answer failed: {content['error'].get('message')}")
            events.append((at, content))
    return events


async def ask_all(
    url: str, prompts: Sequence[Prompt | str], n_tokens: int, stop: Sequence[str] | None = None
) -> list[tuple[Stream, dict[str, Any]]]:
    """All prompts at once: the stream and usage of each. Times count from the moment they are sent.

    Raises :class:`BenchFailed`.
    """
    answers = [await Answer.connect(url) for _ in prompts]
    try:
        started = perf_counter()
        for answer, prompt in zip(answers, prompts, strict=True):
            answer.ask(prompt, n_tokens, stop=stop)
        await _in_time(lambda: asyncio.gather(*(answer.ended.wait() for answer in answers)), url)
    finally:
        for answer in answers:
            answer.leave()
    found = []
    for answer in answers:
        stream = answer.stream()
        if stop is None and stream.n_tokens != n_tokens:
            raise BenchFailed(f"{url}: an answer has {stream.n_tokens} tokens, expected {n_tokens}")
        stream.times_s = [t - started for t in stream.times_s]
        found.append((stream, answer.usage))
    return found


async def _in_time(work: Callable[[], Awaitable[object]], url: str) -> None:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await work()
    except TimeoutError:
        raise BenchFailed(f"{url}: no complete answer within {ANSWER_TIMEOUT_S:g} s") from None


async def first_token(answer: Answer, url: str) -> None:
    """Waits until the answer's first event came."""
    await _in_time(answer.first.wait, url)


def decode(url: str, prompts: Sequence[Prompt], n_tokens: int) -> list[Stream]:
    """All prompts at once, greedy; the stream of each."""
    return [stream for stream, _ in run_client(ask_all(url, prompts, n_tokens))]


def ttft_s(url: str, prompt: Prompt) -> float:
    """Seconds from sending the request, on an open connection, to its first token."""
    (stream,) = decode(url, [prompt], 1)
    return stream.times_s[0]
