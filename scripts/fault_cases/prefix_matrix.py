"""Which check notices damage to what is cached: on either node, with every check on and with each of them off in turn.

Every case has a new prompt with two full pages, which is asked twice. The first answer is the right one: nothing was
cached. Then both nodes have its pages, and the fault strikes: the prefill node goes on from its snapshot, the decode
node offers its pages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster import ClusterFailed, Pair
from cluster.asking import End, Outcome, Question, ask
from cluster.tool import Section
from rich.console import Console
from rich.progress import track

from server.faults.spec import PAGED_NAMES
from server.transfer.checks import Check

PAGE_SIZE = 256
N_PAGES = 2
N_SUFFIX = 20
MAX_TOKENS = 8
BOTH_OFF = (Check.DIGEST, Check.OFFER)
"""Switched off together, too: either alone makes up for the other."""
NOBODY, RIGHT, WRONG = "-", "right", "**wrong**"
_TIMEOUT_S = 60.0
PREFIXES = Section("prefix matrix")


@dataclass(frozen=True)
class Case:
    """One fault of what is cached, on the ``prefill`` or the ``decode`` node, or on both (``either``)."""

    node: str
    fault: str

    def faults(self, node: str) -> list[str]:
        return [self.fault] if self.node in (node, "either") else []


CASES = (
    *(Case("prefill", f"flip-page:{name}") for name in PAGED_NAMES),
    Case("prefill", "flip-snapshot"),
    Case("prefill", "stale-snapshot"),
    Case("prefill", "shift-snapshot"),
    *(Case("decode", f"flip-page:{name}") for name in PAGED_NAMES),
    *(Case("decode", f"vary-page:{name}") for name in PAGED_NAMES),
    Case("decode", "overwrite-offer"),
    Case("decode", "evict-offer"),
    Case("either", "collide-keys"),
)


@dataclass(frozen=True)
class Seen:
    """The checks that noticed a case, and the answer that the client got."""

    noticed: str
    answer: str


Off = tuple[Check, ...]
"""Checks that are switched off."""


@dataclass(frozen=True)
class PrefixMatrix:
    """What came of each case, by the checks that were off."""

    seen: dict[tuple[Off, Case], Seen]

    @property
    def changed(self) -> dict[tuple[Off, Case], Seen]:
        """Where it is not what it is with every check on."""
        return {(off, case): seen for (off, case), seen in self.seen.items() if seen != self.seen[(), case]}

    @property
    def harmful(self) -> list[Case]:
        """Those that a client notices though every check is on."""
        return [case for (off, case), seen in self.seen.items() if not off and seen.answer != RIGHT]


class PrefixBench:
    """Puts cases through a running pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._random = random.Random(0)

    async def seen(self, case: Case, off: Off = ()) -> Seen:
        """Raises :class:`ClusterFailed` if the pair does not answer without a fault, or nothing was cached."""
        unchecked = [f"unchecked:{check}" for check in off]
        prompt, collides = self._ids(N_PAGES * PAGE_SIZE + N_SUFFIX), case.node == "either"
        right = await self._cached(prompt)
        if collides:
            self._pair.arm(prefill=[case.fault], decode=[case.fault])
            await self._cached(self._ids(len(prompt)))
        self._pair.arm(
            prefill=[*case.faults("prefill"), *unchecked],
            decode=[*case.faults("decode"), *unchecked],
        )
        before, reused = self._pair.totals("pd_check_failures_total"), self._reused()
        outcome = await self._ask(prompt)
        found = self._pair.totals("pd_check_failures_total") - before
        self._pair.arm()
        noticed = ", ".join(sorted({check for check, _ in found})) or NOBODY
        if outcome.end is not End.ANSWERED:
            return Seen(noticed, f"HTTP {outcome.status} `{outcome.error.get('code')}`")
        if not found and (self._reused() > reused) is collides:
            raise ClusterFailed(f"{case.fault} on {case.node}: {self._reused() - reused} tokens out of the cache")
        return Seen(noticed, RIGHT if outcome.choices == right.choices else WRONG)

    async def warm_up(self) -> None:
        """A hit: a stale snapshot needs one before."""
        self._pair.arm()
        prompt = self._ids(N_PAGES * PAGE_SIZE + N_SUFFIX)
        await self._cached(prompt)
        await self._answer(prompt)

    async def _cached(self, prompt: Sequence[int]) -> Outcome:
        """The answer to a new prompt, of which both nodes then have all pages, with a snapshot behind each."""
        answer = await self._answer(prompt)
        for n_pages in range(1, N_PAGES):
            await self._answer([*prompt[: n_pages * PAGE_SIZE], *self._ids(N_SUFFIX)])
        return answer

    def _ids(self, n: int) -> list[int]:
        return self._random.choices(range(10, 500), k=n)

    def _reused(self) -> int:
        return self._pair.totals("pd_prefix_reused_tokens_total").total()

    async def _answer(self, prompt: Sequence[int]) -> Outcome:
        outcome = await self._ask(prompt)
        if outcome.end is not End.ANSWERED:
            raise ClusterFailed(f"a request without any fault failed: {outcome}")
        return outcome

    async def _ask(self, prompt: Sequence[int]) -> Outcome:
        body = {
            "model": "tiny-dsv4",
            "prompt": list(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        return await ask(self._pair.d.url, Question("/v1/completions", body), timeout_s=_TIMEOUT_S)


async def measure(pair: Pair, cases: Sequence[Case], checks: Sequence[Check], console: Console) -> PrefixMatrix:
    """Puts ``cases`` through the pair: with every check, without each of ``checks``, and without two of them."""
    bench = PrefixBench(pair)
    await bench.warm_up()
    offs: list[Off] = [(), *((check,) for check in checks), *([BOTH_OFF] if set(BOTH_OFF) <= set(checks) else [])]
    seen: dict[tuple[Off, Case], Seen] = {}
    for off in offs:
        for case in track(cases, f"cached, {_shown(off)} off" if off else "cached, every check on", console=console):
            seen[off, case] = await bench.seen(case, off)
    return PrefixMatrix(seen)


def _shown(off: Iterable[Check]) -> str:
    return " and ".join(off)


def report(matrix: PrefixMatrix) -> str:
    """Both tables."""
    lines = ["| fault | node | what notices | the answer |", "|---|---|---|---|"]
    lines += [
        f"| `{case.fault}` | {case.node} | {seen.noticed} | {seen.answer} |"
        for (off, case), seen in matrix.seen.items()
        if not off
    ]
    n_without = sum(bool(off) for off, _ in matrix.seen)
    words = (
        f"Each check switched off in turn, and `{BOTH_OFF[0]}` together with `{BOTH_OFF[1]}`: {n_without} runs. In "
        f"{n_without - len(matrix.changed)} of them all was as above. In the other {len(matrix.changed)}:"
    )
    lines += [
        "",
        words,
        "",
        "| what is off | fault | node | what still notices | the answer |",
        "|---|---|---|---|---|",
    ]
    together: dict[tuple[Off, str, Seen], list[str]] = {}
    for (off, case), seen in matrix.changed.items():
        together.setdefault((off, case.node, seen), []).append(f"`{case.fault}`")
    lines += [
        f"| {_shown(off)} | {', '.join(names)} | {node} | {seen.noticed} | {seen.answer} |"
        for (off, node, seen), names in together.items()
    ]
    return "\n".join(lines)


def measured(pair: Pair, checks: Sequence[Check], console: Console) -> PrefixMatrix:
    """All cases, in an event loop of their own."""
    return asyncio.run(measure(pair, CASES, checks, console))
