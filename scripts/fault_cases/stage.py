"""Where the entries of scripts/faults.py are played: a pair whose faults can be changed, and one process as the oracle.

The pair is made to be cornered: two slots and 16 pages on the prefill node, short deadlines, a second prefill node that
takes connections and never answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterFailed, Node, nothing_left, until_async
from cluster.asking import End, Outcome, Question, ask
from cluster.oracle import OracleCluster, oracle_cluster
from hostile.rogue_peer import silent_port

READY_S = 120.0
FREE_S = 40.0
TIMEOUT_S = 120.0
POLL_S = 0.05
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
    """The running nodes."""

    nodes: OracleCluster
    logs: Path

    @property
    def prefill(self) -> Node:
        return self.nodes.prefills[0]

    @property
    def decode(self) -> Node:
        return self.nodes.decode

    def arm(self, *, prefill: Iterable[str] = (), decode: Iterable[str] = ()) -> None:
        """The faults of both nodes from now on; none without arguments."""
        self.prefill.arm(*prefill)
        self.decode.arm(*decode)

    async def calm(self) -> None:
        """No fault, both nodes serving, nothing held. Raises :class:`cluster.ClusterFailed` if that does not come."""
        self.arm()
        for node in self.nodes.subjects:
            if not node.running:
                node.start()
        await self.nodes.serve(READY_S)
        left, _ = await nothing_left(self.nodes.held, FREE_S)
        if left:
            raise ClusterFailed(f"the pair holds what it should not: {left}")

    async def ask(self, asked: Question, *, stream: bool = False, abort_s: float | None = None) -> Outcome:
        return await ask(self.decode.url, asked, stream=stream, leave_s=abort_s, timeout_s=TIMEOUT_S)

    async def right(self, asked: Question) -> Outcome:
        """The pair's answer. Raises :class:`Silent` unless it is the oracle's, log probabilities included."""
        return await self.compare(asked, await self.ask(asked))

    async def compare(self, asked: Question, outcome: Outcome) -> Outcome:
        expected = await self.nodes.right_answer(asked)
        expect(outcome.end is End.ANSWERED, f"not answered: {outcome}")
        expect(outcome.prefill == self.prefill.address, f"prefill was {outcome.prefill}, not {self.prefill.address}")
        expect(outcome.choices == expected.choices, f"{outcome.choices} instead of {expected.choices}")
        return outcome

    async def refused(self, fault: str, check: str, component: str, n: int = 263, *more: str) -> str:
        """One request beside ``fault`` (and ``more`` faults) on the prefill node: ``check`` must refuse it by name."""
        self.arm(prefill=(fault, *more), decode=[one for one in more if one.startswith("unchecked")])
        before = await self.totals("pd_check_failures_total")
        outcome = await self.ask(question(n, time.monotonic_ns()))
        found = await self.totals("pd_check_failures_total") - before
        self.arm()
        expect(outcome.status == 502, f"{fault}: {outcome}")
        expect(outcome.error.get("component") == component, f"{fault}: the error names another: {outcome}")
        expect(found == Counter({(check, component): 1}), f"{fault}: other checks fired: {dict(found)}")
        return f"{fault}: check {check} refuses it, HTTP 502 names {component}"

    async def totals(self, name: str) -> Counter[tuple[str, ...]]:
        """The counters called ``name`` of all nodes, by the values of their labels."""
        return await asyncio.to_thread(self.nodes.totals, name)

    async def free_again(self) -> float:
        """Seconds until both nodes hold nothing. Raises :class:`Silent` if they go on holding something."""
        left, seconds = await nothing_left(self.nodes.held, FREE_S)
        expect(not left, f"not free after {seconds:.1f} s: {left}")
        return seconds

    async def wait(self, what: str, is_so: Callable[[], object], timeout_s: float = 20.0) -> float:
        """Seconds until ``is_so()``, called in a thread. Raises :class:`Silent` if that does not come."""
        try:
            return await until_async(is_so, timeout_s, what)
        except TimeoutError as error:
            raise Silent(str(error)) from None

    async def seen(self, is_so: Callable[[], bool], asked: asyncio.Task[Outcome]) -> bool:
        """Whether ``is_so`` was true once before ``asked`` had ended and both nodes held nothing any more."""
        while not await asyncio.to_thread(is_so):
            if asked.done() and not await asyncio.to_thread(self.nodes.held):
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def restart_prefill(self) -> float:
        """Starts the dead prefill node on its ports; seconds from its first sign of life until a request is right."""
        self.prefill.start()
        await asyncio.to_thread(self.prefill.wait_for, "/health", READY_S)
        started = time.monotonic()
        while (await self.ask(question(20, time.monotonic_ns()))).end is not End.ANSWERED:
            expect(time.monotonic() - started < FREE_S, "no request is answered after the restart")
            await asyncio.sleep(0.1)
        return time.monotonic() - started

    @asynccontextmanager
    async def another_prefill(self, *options: str) -> AsyncIterator[Node]:
        """One more prefill node, which nobody is registered with."""
        node = Node("prefill", self.logs / "another.log", *options, name="another")
        async with Cluster([node]).started():
            await asyncio.to_thread(node.wait_for, "/health", READY_S)
            yield node


@asynccontextmanager
async def stage(logs: Path) -> AsyncIterator[Stage]:
    """Starts everything and waits until it serves. Raises :class:`cluster.ClusterFailed` if it does not."""
    async with (
        silent_port() as silent,
        oracle_cluster(0, 1, logs, PREFILL_OPTIONS, DECODE_OPTIONS, silent=(silent,)) as nodes,
    ):
        made = Stage(nodes, logs)
        await made.calm()
        yield made
