"""One client: what it asks, whether it reads a stream or goes away, and what came."""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

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
    url: str,
    question: Question,
    *,
    stream: bool = False,
    leave_s: float | None = None,
    timeout_s: float,
    reconnect_for_s: float = RECONNECT_FOR_S,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Outcome:
    """Asks on a connection of its own, and goes away after ``leave_s``. ``on_event`` gets the events of a stream.

    While nobody listens (a node is being restarted) it tries again; the deadline counts from the connection.
    """
    outcome = Outcome(End.BROKEN)
    began = time.monotonic()
    while True:
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(timeout_s if leave_s is None else leave_s),
                httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False) as client,
                client.stream("POST", question.path, json={**question.body, "stream": stream}) as response,
            ):
                await _read(response, outcome, on_event if stream else None)
        except httpx.ConnectError as error:
            outcome.error = {"code": "ConnectError", "message": str(error)}
            if started - began < reconnect_for_s:
                await asyncio.sleep(RECONNECT_S)
                continue
        except TimeoutError:
            outcome.end = End.HUNG if leave_s is None else End.ABORTED
        except httpx.TimeoutException:
            outcome.end = End.HUNG
        except httpx.TransportError as error:
            outcome.end = End.BROKEN
            outcome.error = {"code": type(error).__name__, "message": str(error)}
        outcome.seconds = time.monotonic() - started
        return outcome


async def _read(response: httpx.Response, outcome: Outcome, on_event: Callable[[dict[str, Any]], None] | None) -> None:
    """Reads the answer, as a stream with ``on_event``."""
    outcome.error = {}
    outcome.status, outcome.prefill = response.status_code, response.headers.get("x-pd-prefill")
    if not response.is_success:
        outcome.error = json.loads(await response.aread())["error"]
        outcome.end = End.REFUSED
    elif on_event is None:
        outcome.add(json.loads(await response.aread()))
        outcome.end = End.ANSWERED
    else:
        await _read_events(response, outcome, on_event)


async def _read_events(response: httpx.Response, outcome: Outcome, on_event: Callable[[dict[str, Any]], None]) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            outcome.end = End.ANSWERED
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                outcome.end, outcome.error = End.FAILED, event["error"]
                return
            outcome.add(event)
            on_event(event)
    if outcome.end is not End.ANSWERED:
        outcome.end, outcome.error = End.BROKEN, {"code": "early_end", "message": "the stream ended without [DONE]"}
