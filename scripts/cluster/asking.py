"""One client: what it asks, whether it reads a stream or goes away, and what came."""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.node import PLAIN_HTTP

VOCABULARY = range(3, 500)
"""Token ids that prompts are made of: no special ones."""
RECONNECT_S, RECONNECT_FOR_S = 0.2, 150.0
"""A client that finds nobody tries again every so often, for longer than a node may take to start."""


@dataclass(frozen=True)
class Question:
    """One distinct request: ``path`` and the JSON body but for ``stream``. ``status`` is what must be answered."""

    path: str
    body: dict[str, Any] = field(hash=False)
    status: int = 200

    @property
    def shown(self) -> str:
        text = json.dumps(self.body)
        return f"{self.path} {text if len(text) < 400 else text[:400] + '...'}"


class End(enum.StrEnum):
    """How a client's request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """An error status instead of an answer."""
    FAILED = "failed"
    """A stream that began and ended in an error event."""
    BROKEN = "broken"
    """The connection broke."""
    ABORTED = "aborted"
    """The client went away, as planned."""
    HUNG = "hung"
    """Neither answer nor refusal within the client's deadline."""


class EarlyEnd(Exception):
    """A stream ended before its end, or cannot be read."""


class RequestError(Exception):
    """A request was answered by an error, whose object is ``error``: as OpenAI has it, or the start of the body."""

    def __init__(self, where: str, body: bytes) -> None:
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            error = body[:200].decode("utf-8", "replace")
        self.error: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error)}
        super().__init__(f"{where}: {self.error.get('message')}")


@dataclass
class Choice:
    """One generation as the client has it so far: its text, and ``(token, logprob, top)`` where they were asked for."""

    text: str = ""
    tokens: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None

    def add(self, choice: dict[str, Any]) -> None:
        """Takes a whole choice, or the next one of a stream."""
        part = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or part.get("content") or ""
        self.tokens += _tokens(choice.get("logprobs") or {})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.stop_reason = choice.get("stop_reason") or self.stop_reason

    def begins(self, whole: Choice) -> bool:
        """Whether this may be the beginning of ``whole``."""
        return whole.text.startswith(self.text) and whole.tokens[: len(self.tokens)] == self.tokens


@dataclass
class Outcome:
    """What one client saw. ``seconds`` from its request to its end; ``error`` is the error object, or what broke."""

    end: End = End.HUNG
    status: int | None = None
    error: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    prefill: str | None = None
    seconds: float = 0.0

    def add(self, body: dict[str, Any]) -> None:
        self.prefill = (body.get("pd") or {}).get("prefill", self.prefill)
        for choice in body["choices"]:
            self.choices.setdefault(choice["index"], Choice()).add(choice)

    def __str__(self) -> str:
        error = f" {self.error.get('code')}: {self.error.get('message')}" if self.error else ""
        return f"{self.end} (HTTP {self.status}){error}"


def _tokens(logprobs: dict[str, Any]) -> Iterable[Any]:
    if "content" in logprobs:
        return [(t["token"], t["logprob"], t["top_logprobs"]) for t in logprobs["content"]]
    names, values = logprobs.get("tokens", []), logprobs.get("token_logprobs", [])
    tops = logprobs.get("top_logprobs") or [None] * len(names)
    return list(zip(names, values, tops, strict=True))


async def ask(
    url: str, question: Question, *, stream: bool = False, leave_s: float | None = None, timeout_s: float
) -> Outcome:
    """Asks on a connection of its own, and goes away after ``leave_s``.

    While nobody listens (a node is being restarted) it tries again; the deadline counts from the connection.
    """
    outcome = Outcome(End.BROKEN)
    began = time.monotonic()
    while True:
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(timeout_s if leave_s is None else leave_s),
                httpx.AsyncClient(base_url=url, timeout=timeout_s, **PLAIN_HTTP) as client,
                client.stream("POST", question.path, json={**question.body, "stream": stream}) as response,
            ):
                await _read(response, outcome, stream=stream)
        except httpx.ConnectError as error:
            outcome.error = {"code": "ConnectError", "message": str(error)}
            if started - began < RECONNECT_FOR_S:
                await asyncio.sleep(RECONNECT_S)
                continue
        except TimeoutError:
            outcome.end = End.HUNG if leave_s is None else End.ABORTED
        except httpx.TimeoutException:
            outcome.end = End.HUNG
        except httpx.TransportError as error:
            outcome.end = End.BROKEN
            outcome.error = {"code": type(error).__name__, "message": str(error)}
        except RequestError as failed:
            outcome.end = End.FAILED if response.is_success else End.REFUSED
            outcome.error = failed.error
        except EarlyEnd as early:
            outcome.end = End.BROKEN
            outcome.error = {"code": "early_end", "message": str(early)}
        outcome.seconds = time.monotonic() - started
        return outcome


async def _read(response: httpx.Response, outcome: Outcome, *, stream: bool) -> None:
    outcome.error = {}
    outcome.status, outcome.prefill = response.status_code, response.headers.get("x-pd-prefill")
    if stream:
        async for event in events_of(response):
            outcome.add(event)
    else:
        await _raise_for_status(response)
        outcome.add(json.loads(await response.aread()))
    outcome.end = End.ANSWERED


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream. Raises :class:`RequestError`, or :class:`EarlyEnd` for an end without [DONE]."""
    await _raise_for_status(response)
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise EarlyEnd(f"the stream holds something other than JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise EarlyEnd(f"the stream holds something other than objects: {data[:80]!r}")
        if "error" in event:
            raise RequestError("error in the stream", data.encode())
        yield event
    raise EarlyEnd("the stream ended without [DONE]")


async def _raise_for_status(response: httpx.Response) -> None:
    if response.status_code != httpx.codes.OK:
        raise RequestError(f"HTTP {response.status_code}", await response.aread())
