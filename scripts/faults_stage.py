"""Where the entries of scripts/faults.py are played: a pair whose faults can be changed, and one process as the oracle.

The pair is made to be cornered: two slots and 16 pages on the prefill node, short deadlines, a second prefill node that
takes connections and never answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from process_pair import free_ports
from quickstart import HOST
from rogue_peer import deaf_port
from soak_client import End, Outcome, ask
from soak_nodes import POLL_S, STOP_S, Node, SoakFailed, running, until
from soak_plan import Question, Room

READY_S = 120.0
FREE_S = 40.0
TIMEOUT_S = 120.0
PREFILL_OPTIONS = ("--slots", "2", "--pages", "16", "--deadline", "transfer=12")
DECODE_OPTIONS = ("--slots", "8", "--deadline", "queued=4")
GREEDY = {"temperature": 0, "ignore_eos": True, "logprobs": 1}


class Silent(Exception):
    """The expected detector did not fire. Says what happened instead."""


def expect(is_so: bool, otherwise: str) -> None:
    """Raises :class:`Silent` with ``otherwise`` unless ``is_so``."""
    if not is_so:
        raise Silent(otherwise)


def question(n_tokens: int, which: int = 0, /, **fields: Any) -> Question:
    """A greedy completion of a random prompt, drawn by ``which``; ``fields`` of the body over the usual ones."""
    prompt = random.Random(f"{n_tokens} {which}").choices(range(10, 500), k=n_tokens)
    return Question("/v1/completions", {"prompt": prompt, "max_tokens": 8, **GREEDY, **fields})


@dataclass
class Stage:
    """The running nodes. ``bootstrap`` is the prefill node's control address."""

    prefill: Node
    decode: Node
    oracle: Node
    bootstrap: str
    logs: Path

    def arm(self, *, prefill: Iterable[str] = (), decode: Iterable[str] = ()) -> None:
        """The faults of both nodes from now on; none without arguments."""
        self.prefill.arm(*prefill)
        self.decode.arm(*decode)

    async def calm(self) -> None:
        """No fault, both nodes serving, nothing held. Raises :class:`SoakFailed` if that does not come."""
        self.arm()
        for node in (self.prefill, self.decode):
            if not node.running:
                node.start()
        for look, timeout_s in ((self._not_ready, READY_S), (self.held, FREE_S)):
            left, _ = await until(look, timeout_s)
            if left:
                raise SoakFailed(f"the pair is not as it was: {left}")

    async def ask(self, asked: Question, *, stream: bool = False, abort_s: float | None = None) -> Outcome:
        return await ask(self.decode.url, asked, Room(0, 0, stream, 0.0, abort_s), timeout_s=TIMEOUT_S)

    async def right(self, asked: Question) -> Outcome:
        """The pair's answer. Raises :class:`Silent` unless it is the oracle's, log probabilities included."""
        return await self.compare(asked, await self.ask(asked))

    async def compare(self, asked: Question, outcome: Outcome) -> Outcome:
        expected = await ask(self.oracle.url, asked, timeout_s=TIMEOUT_S)
        expect(outcome.end is End.ANSWERED, f"not answered: {outcome}")
        expect(outcome.prefill == self.bootstrap, f"prefill was {outcome.prefill}, not {self.bootstrap}")
        expect(outcome.choices == expected.choices, f"{outcome.choices} instead of {expected.choices}")
        return outcome

    async def refused(self, fault: str, check: str, component: str, n: int = 263, *more: str) -> str:
        """One request beside ``fault`` (and ``more`` faults) on the prefill node: ``check`` must refuse it by name."""
        self.arm(prefill=(fault, *more), decode=[one for one in more if one.startswith("unchecked")])
        before = await self.check_failures()
        outcome = await self.ask(question(n, time.monotonic_ns()))
        found = await self.check_failures() - before
        self.arm()
        expect(outcome.status == 502, f"{fault}: {outcome}")
        expect(outcome.error.get("component") == component, f"{fault}: the error names another: {outcome}")
        expect(found == Counter({(check, component): 1}), f"{fault}: other checks fired: {dict(found)}")
        return f"{fault}: check {check} refuses it, HTTP 502 names {component}"

    async def check_failures(self) -> Counter[tuple[str, str]]:
        """``pd_check_failures_total`` of both nodes, by check and component."""
        found: Counter[tuple[str, str]] = Counter()
        for node in (self.prefill, self.decode):
            for name, value in (await node.metrics()).items():
                if name.startswith("pd_check_failures_total{"):
                    check, _, component = name.removeprefix("pd_check_failures_total{").rstrip("}").partition(",")
                    found[check, component] += int(value)
        return found

    async def held(self) -> list[str]:
        return [what for node in (self.prefill, self.decode) for what in await node.held()]

    async def free_again(self) -> float:
        """Seconds until both nodes hold nothing. Raises :class:`Silent` if they go on holding something."""
        left, seconds = await until(self.held, FREE_S)
        expect(not left, f"not free after {seconds:.1f} s: {left}")
        return seconds

    async def wait(self, what: str, is_so: Any, timeout_s: float = 20.0) -> float:
        """Seconds until ``await is_so()``. Raises :class:`Silent` if that does not come."""

        async def missing() -> str:
            return "" if await is_so() else what

        left, seconds = await until(missing, timeout_s)
        expect(not left, f"not within {timeout_s:g} s: {what}")
        return seconds

    async def seen(self, is_so: Callable[[Stage], Awaitable[bool]], asked: asyncio.Task[Outcome]) -> bool:
        """Whether ``is_so`` was true once before ``asked`` had ended and both nodes held nothing any more."""
        while not (await is_so(self)):
            if asked.done() and not await self.held():
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def restart_prefill(self) -> float:
        """Starts the dead prefill node on its ports; seconds from its first sign of life until a request is right."""
        self.prefill.start()
        left, _ = await until(lambda: _no_health(self.prefill), READY_S)
        if left:
            raise SoakFailed(f"the prefill node does not start: {left}")
        started = time.monotonic()
        while (await self.ask(question(20, time.monotonic_ns()))).end is not End.ANSWERED:
            expect(time.monotonic() - started < FREE_S, "no request is answered after the restart")
            await asyncio.sleep(0.1)
        return time.monotonic() - started

    @asynccontextmanager
    async def another_prefill(self, *options: str) -> AsyncIterator[str]:
        """The control address of one more prefill node, which nobody is registered with."""
        http, control = free_ports(2)
        node = Node("another", ["launch_prefill", "--bootstrap-port", str(control), *options], http, self.logs)
        node.start()
        try:
            if left := (await until(lambda: _no_health(node), READY_S))[0]:
                raise SoakFailed(f"one more prefill node does not start: {left}")
            yield f"{HOST}:{control}"
        finally:
            await asyncio.to_thread(node.stop, STOP_S)

    async def _not_ready(self) -> str:
        peers = (await self.decode.info())["peers"]
        state = {peer["address"]: peer["state"] for peer in peers}[self.bootstrap]
        if state != "registered":
            return f"{self.bootstrap} is {state}"
        ready = await self.decode.get("/ready")
        return "" if ready.is_success else ready.text


@asynccontextmanager
async def stage(logs: Path) -> AsyncIterator[Stage]:
    """Starts everything and waits until it serves. Raises :class:`SoakFailed` if it does not."""
    async with (
        deaf_port() as deaf,
        running(0, 1, logs, PREFILL_OPTIONS, (*DECODE_OPTIONS, "--prefill", deaf)) as (nodes, oracle),
    ):
        (node,), (bootstrap,) = nodes.prefills, nodes.bootstraps
        made = Stage(node, nodes.decode, oracle, bootstrap, logs)
        await made.calm()
        left, _ = await until(lambda: _no_health(oracle), READY_S)
        if left:
            raise SoakFailed(f"the process that computes alone does not start: {left}")
        yield made


async def _no_health(node: Node) -> str:
    health: httpx.Response = await node.get("/health")
    return "" if health.is_success else health.text
