"""A client that asks the same small questions again and again: is every answer the first one, and how soon?"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

REQUEST_S = 120.0
PAUSE_S = 0.05
BODIES: list[dict[str, Any]] = [
    {"prompt": [20 + i % 300 for i in range(n)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    for n in (3, 18, 130, 300)
]


@dataclass
class Answers:
    """What became of the questions: seconds of those answered right, and what came instead of the others."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """By nearest rank; 0 without answers."""
        ranked = sorted(self.seconds)
        return ranked[math.ceil(len(ranked) * percent / 100) - 1] if ranked else 0.0

    def mistakes(self, within_s: float) -> list[str]:
        """The answers that were wrong, missing, or later than ``within_s``."""
        late = [f"answered after {seconds:.1f} s" for seconds in self.seconds if seconds > within_s]
        return [*self.wrong, *self.missing, *late]


class Witness:
    """Asks :data:`BODIES` in turn, each on a connection of its own. The first answers are the right ones."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False, limits=limits)
        self._expected = [self._ask(body) for body in BODIES]

    def ask(self, is_over: Callable[[], bool], pause_s: float = 0.0) -> Answers:
        """Asks every question once, and then on until ``is_over``."""
        answers, n = Answers(), 0
        while n < len(BODIES) or not is_over():
            which = n % len(BODIES)
            started = time.monotonic()
            try:
                text = self._ask(BODIES[which])
            except httpx.HTTPError as error:
                answers.missing.append(f"{type(error).__name__}: {error}"[:300])
            else:
                if text == self._expected[which]:
                    answers.seconds.append(time.monotonic() - started)
                else:
                    answers.wrong.append(f"{text!r} instead of {self._expected[which]!r}")
            n += 1
            time.sleep(pause_s)
        return answers

    def _ask(self, body: dict[str, Any]) -> str:
        response = self._client.post("/v1/completions", json=body)
        if response.is_error:
            raise httpx.HTTPError(f"HTTP {response.status_code} {response.text}")
        return str(response.json()["choices"][0]["text"])


@contextlib.contextmanager
def watched(url: str) -> Iterator[Answers]:
    """A witness in a thread. What it saw is complete when the block has ended."""
    witness, answers, over = Witness(url), Answers(), threading.Event()

    def ask() -> None:
        for seen in (witness.ask(over.is_set, PAUSE_S), witness.ask(lambda: True)):
            answers.seconds += seen.seconds
            answers.wrong += seen.wrong
            answers.missing += seen.missing

    thread = threading.Thread(target=ask, name="witness", daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()
