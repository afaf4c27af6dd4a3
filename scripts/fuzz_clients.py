"""Hostile clients beside small requests: is every small one answered right and soon, and does memory come back?"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import hostile_clients
import httpx
from fuzz_zmq import resident_mib
from hostile_clients import Attack

WITHIN_S = 10.0
"""A small request beside an attack is answered within this time. It takes a few hundredths of a second alone."""
GROWTH = 1.1
"""What a node's memory may be of what it was, when an attack is over and has been cleared away."""
WARM_UP_S = 1.0
FORGET_S = 20.0
LINGER_S = 1.0
"""Small requests are asked for so long after an attack: its work may outlive its clients."""
_REQUEST_S = 120.0
_BODIES = [
    {"prompt": [20 + i % 300 for i in range(n)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    for n in (3, 18, 130)
]


class Attacked(Protocol):
    """A node of the pair."""

    role: str
    url: str

    @property
    def pid(self) -> int: ...

    def info(self) -> dict[str, Any]: ...


@dataclass
class Answers:
    """What became of small requests: seconds of those answered right, and what was wrong."""

    seconds: list[float] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """By nearest rank; 0 without answers."""
        ranked = sorted(self.seconds)
        return ranked[math.ceil(len(ranked) * percent / 100) - 1] if ranked else 0.0

    def as_json(self) -> dict[str, Any]:
        shown = {f"p{percent}_ms": round(1000 * self.percentile(percent), 1) for percent in (50, 99)}
        return {"answered": len(self.seconds), **shown}


class SmallRequests:
    """A client that asks the same small questions again and again, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(
            base_url=url, timeout=_REQUEST_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._expected: list[str] = []
        first = self.ask(lambda n: n >= len(_BODIES))
        if first.mistakes:
            raise RuntimeError(f"not answered before any attack: {first.mistakes}")

    def ask(self, is_over: Callable[[int], bool]) -> Answers:
        """Asks until ``is_over(n asked)``."""
        answers, n = Answers(), 0
        while not is_over(n):
            which = n % len(_BODIES)
            began, text = time.monotonic(), self._text(_BODIES[which], answers)
            seconds = time.monotonic() - began
            if text is not None:
                self._judge(which, text, seconds, answers)
            n += 1
        return answers

    def _text(self, body: dict[str, Any], answers: Answers) -> str | None:
        try:
            response = self._client.post("/v1/completions", json=body)
            if response.is_success:
                return str(response.json()["choices"][0]["text"])
            answers.mistakes.append(f"HTTP {response.status_code} {response.text[:200]}")
        except httpx.TransportError as error:
            answers.mistakes.append(f"{type(error).__name__}: {error}")
        return None

    def _judge(self, which: int, text: str, seconds: float, answers: Answers) -> None:
        if len(self._expected) <= which:
            self._expected.append(text)
        if text != self._expected[which]:
            answers.mistakes.append(f"{text!r} instead of {self._expected[which]!r}")
        elif seconds > WITHIN_S:
            answers.mistakes.append(f"answered after {seconds:.1f} s")
        else:
            answers.seconds.append(seconds)


def attack_pair(
    prefill: Attacked, decode: Attacked, attacks: Sequence[Attack], seed: int, seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """Attacks each node of a running pair in every way for ``seconds``; a report, and what was wrong."""
    small = SmallRequests(decode.url)
    quiet = small.ask(_after(seconds))
    report: dict[str, Any] = {"quiet": quiet.as_json()}
    mistakes = [f"quiet: {mistake}" for mistake in quiet.mistakes[:3]]
    registered = prefill.info()["peers"]
    for node in (decode, prefill):  # the first large requests fill what the allocators keep
        for attack in (Attack.BODIES, Attack.LISTS):
            hostile_clients.run(attack, node.url, seed, min(seconds, WARM_UP_S))
    before = {node.role: resident_mib(node.pid) for node in (prefill, decode)}
    for attack in attacks:
        for node in (decode, prefill):
            name = f"{attack} at {node.role}"
            treated, beside = _beside(small, attack, node.url, seed, seconds)
            left = _memory_left((prefill, decode), before)
            report[name] = {**beside.as_json(), "clients": dict(treated), "memory": left}
            mistakes += [f"{name}: {mistake}" for mistake in [*beside.mistakes[:3], *_unclear(treated)]]
            mistakes += [f"{name}: the {each} node keeps {now}" for each, now in left.items() if now.endswith("!")]
            if prefill.info()["peers"] != registered:
                mistakes.append(f"{name}: the decode node was lost and has registered anew")
                registered = prefill.info()["peers"]
    return report, mistakes


def _beside(small: SmallRequests, attack: Attack, url: str, seed: int, seconds: float) -> tuple[Counter[str], Answers]:
    """The attack's clients, and the small requests beside them and a little longer."""
    treated: Counter[str] = Counter()
    attacking = threading.Thread(
        target=lambda: treated.update(hostile_clients.run(attack, url, seed, seconds)), daemon=True
    )
    attacking.start()
    ended: list[float] = []

    def is_over(_: int) -> bool:
        if not attacking.is_alive() and not ended:
            ended.append(time.monotonic())
        return bool(ended) and time.monotonic() - ended[0] > LINGER_S

    answers = small.ask(is_over)
    return treated, answers


def _after(seconds: float) -> Callable[[int], bool]:
    began = time.monotonic()
    return lambda n: n >= len(_BODIES) and time.monotonic() - began > seconds


def _unclear(treated: Counter[str]) -> list[str]:
    """Answers that are a fault of the server's. (503: it has no room for so many clients.)"""
    return [f"a client got {how}" for how in treated if how.startswith("HTTP 5") and how != "HTTP 503"]


def _memory_left(nodes: Sequence[Attacked], before: dict[str, float]) -> dict[str, str]:
    """Waits until each node's memory is within :data:`GROWTH` of what it was; what it is, with ``!`` where it stays
    (that is what it was, for the next attack).
    """
    deadline = time.monotonic() + FORGET_S
    left = {}
    for node in nodes:
        while (now := resident_mib(node.pid)) > GROWTH * before[node.role] and time.monotonic() < deadline:
            time.sleep(0.2)
        is_too_much = now > GROWTH * before[node.role]
        left[node.role] = f"{now:.0f} MiB of {before[node.role]:.0f}" + ("!" if is_too_much else "")
        before[node.role] = now if is_too_much else before[node.role]
    return left
