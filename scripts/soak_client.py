"""The clients of a soak run: ask, read, perhaps go away, and say whether what came is what must have come."""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from soak_plan import HARMLESS, Event, Kind, Question, Room

REFUSALS = frozenset({429, 502, 503, 504})
"""With these a right request may be turned away while a disturbance lasts."""

RECONNECT_S, RECONNECT_FOR_S = 0.2, 150.0
"""A client that finds nobody tries again every so often, for longer than a node may take to start."""


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


async def ask(url: str, question: Question, room: Room | None = None, *, timeout_s: float) -> Outcome:
    """Asks on a connection of its own; ``room`` says whether to stream and when to go away.

    While nobody listens (a node is being restarted) it tries again; the deadline counts from the connection.
    """
    outcome = Outcome(End.BROKEN)
    leave_s = room.abort_s if room is not None else None
    began = time.monotonic()
    while time.monotonic() - began < RECONNECT_FOR_S:
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s if leave_s is None else leave_s):
                await _read(url, question, outcome, stream=room is not None and room.stream, timeout_s=timeout_s)
        except httpx.ConnectError as error:
            outcome.error = {"code": "ConnectError", "message": str(error)}
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
        break
    return outcome


async def _read(url: str, question: Question, outcome: Outcome, *, stream: bool, timeout_s: float) -> None:
    body = {**question.body, "stream": stream}
    async with (
        httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False) as client,
        client.stream("POST", question.path, json=body) as response,
    ):
        outcome.error = {}
        outcome.status, outcome.prefill = response.status_code, response.headers.get("x-pd-prefill")
        if not response.is_success:
            outcome.error = json.loads(await response.aread())["error"]
            outcome.end = End.REFUSED
        elif not stream:
            outcome.add(json.loads(await response.aread()))
            outcome.end = End.ANSWERED
        else:
            await _read_events(response, outcome)


async def _read_events(response: httpx.Response, outcome: Outcome) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            outcome.end = End.ANSWERED
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                outcome.end, outcome.error = End.FAILED, event["error"]
                return
            outcome.add(event)
    if outcome.end is not End.ANSWERED:
        outcome.end, outcome.error = End.BROKEN, {"code": "early_end", "message": "the stream ended without [DONE]"}


def judge(question: Question, outcome: Outcome, expected: Outcome, event: Event) -> str | None:
    """What is wrong with ``outcome`` beside ``event``, given the answer of one process; None if nothing is."""
    if outcome.end is End.HUNG:
        return f"no answer and no refusal within {outcome.seconds:.1f} s"
    if outcome.error.get("code") in ("internal_error", "engine_error", "engine_died", "component_mismatch"):
        return f"an error that no disturbance explains: {outcome}"
    if (gap := _difference(outcome, expected)) is not None:
        return gap
    match outcome.end:
        case End.ANSWERED if outcome.prefill == "local":
            return "the decode node computed the prompt itself"
        case End.ANSWERED | End.ABORTED:
            return None
        case End.BROKEN:
            ended_decode = event.target == "decode" and event.kind in (Kind.KILL, Kind.TERMINATE)
            return None if ended_decode else f"the connection broke beside {event.kind} of {event.target}: {outcome}"
        case End.REFUSED if outcome.status == question.status:
            return None
        case End.REFUSED if outcome.status not in REFUSALS:
            return f"refused with a status that says nothing of the disturbance: {outcome}"
    return f"not answered beside {event.kind}, which should harm nobody: {outcome}" if event.kind in HARMLESS else None


def _difference(outcome: Outcome, expected: Outcome) -> str | None:
    """Where the tokens that came differ from the right ones."""
    for index, choice in outcome.choices.items():
        whole = expected.choices.get(index)
        if whole is None:
            return f"choice {index} is not among the {len(expected.choices)} expected ones"
        right = choice == whole if outcome.end is End.ANSWERED else choice.begins(whole)
        if not right:
            return f"wrong tokens in choice {index}: {choice}, expected {whole}"
    if outcome.end is End.ANSWERED and len(outcome.choices) != len(expected.choices):
        return f"{len(outcome.choices)} choices, expected {len(expected.choices)} (HTTP {expected.status})"
    return None
