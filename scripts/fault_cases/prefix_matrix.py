"""Which check notices damage to what is cached: on either node, with every check on and with each of them off in turn.

Every case has a new prefix of two pages, which both nodes have cached: the prefill node goes on from its snapshot, the
decode node offers its pages. The right answer is that of the same pair under another salt, which finds nothing.
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
        self._n_salts = 0

    async def seen(self, case: Case, off: Off = ()) -> Seen:
        """Raises :class:`ClusterFailed` if the pair does not answer without a fault, or nothing was cached."""
        unchecked = [f"unchecked:{check}" for check in off]
        collides = case.node == "either"
        if collides:
            self._pair.arm(prefill=[case.fault], decode=[case.fault])
        prefix, suffix = await self._cached_prefix(), self._ids(N_SUFFIX)
        if collides:
            prefix = self._ids(len(prefix))
        right = await self._answer([*prefix, *suffix], salted=True)
        self._pair.arm(
            prefill=[*case.faults("prefill"), *unchecked],
            decode=[*case.faults("decode"), *unchecked],
        )
        before, reused = self._pair.totals("pd_check_failures_total"), self._reused()
        outcome = await self._ask([*prefix, *suffix], salted=False)
        found = self._pair.totals("pd_check_failures_total") - before
        self._pair.arm()
        if not collides and not found and self._reused() == reused:
            raise ClusterFailed(f"{case.fault}: nothing was taken out of the cache")
        noticed = ", ".join(sorted({check for check, _ in found})) or NOBODY
        if outcome.end is not End.ANSWERED:
            return Seen(noticed, f"HTTP {outcome.status} `{outcome.error.get('code')}`")
        return Seen(noticed, RIGHT if outcome.choices == right.choices else WRONG)

    async def warm_up(self) -> None:
        """A hit: a stale snapshot needs one before."""
        self._pair.arm()
        await self._answer([*await self._cached_prefix(), *self._ids(N_SUFFIX)], salted=False)

    async def _cached_prefix(self) -> list[int]:
        """A new one, which both nodes have, with a snapshot behind each page."""
        prefix = self._ids(N_PAGES * PAGE_SIZE)
        for n_pages in range(1, N_PAGES + 1):
            await self._answer([*prefix[: n_pages * PAGE_SIZE], *self._ids(N_SUFFIX)], salted=False)
        return prefix

    def _ids(self, n: int) -> list[int]:
        return self._random.choices(range(10, 500), k=n)

    def _reused(self) -> int:
        return self._pair.totals("pd_prefix_reused_tokens_total").total()

    async def _answer(self, prompt: Sequence[int], *, salted: bool) -> Outcome:
        outcome = await self._ask(prompt, salted=salted)
        if outcome.end is not End.ANSWERED:
            raise ClusterFailed(f"a request without any fault failed: {outcome}")
        return outcome

    async def _ask(self, prompt: Sequence[int], *, salted: bool) -> Outcome:
        body = {
            "model": "tiny-dsv4",
            "prompt": list(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        if salted:
            self._n_salts += 1
            body["cache_salt"] = f"salt {self._n_salts}"
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
