"""Which check notices which lost state: every component, damaged in every way and place, in one pair of processes.

First with every check on: each request must fail, and name the component. Then with each single check off in turn:
which other one notices, or none. The same of what is cached (:mod:`prefix_matrix`), where a request need not fail: what
is damaged is computed or sent again. With ``--write`` the tables go between their markers in docs/failures.md. Exit
code 1 if, while every check was on, a damage was not noticed by its component's name, or changed what a client got.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster import LOGS, ROOT, ClusterFailed, Pair
from cluster.asking import End, Outcome, Question, ask
from cluster.tool import FAILURES, Section, exit_code
from rich.console import Console
from rich.progress import track

from fault_cases import prefix_matrix
from server.cache.live import LIVE_RULES
from server.faults.spec import CLAIMS, STATE, FaultKind, Place
from server.transfer.checks import Check

COMPONENTS = tuple(LIVE_RULES)
DAMAGES = tuple(kind for kind in FaultKind if kind in STATE | CLAIMS)
PLACES = tuple(Place)
WHERE = {
    Place.PLAN: "in the copy plan",
    Place.WIRE: "on the wire",
    Place.MEMORY: "in the decode node's memory",
    Place.POOL: "in the prefill node's pool",
}
N_TOKENS = 263
"""A full page and a part of one, and an open group of every compressor: no component is empty."""
NONE = "none"
_TIMEOUT_S = 60.0
DETECTORS = Section("detector matrix")


@dataclass(frozen=True)
class Case:
    """One damage to one component at one place."""

    component: str
    damage: FaultKind
    place: Place

    @property
    def fault(self) -> str:
        return f"{self.damage}:{self.component}" + (f"@{self.place}" if self.damage in STATE else "")

    @property
    def n_rooms(self) -> int:
        return 2 if self.damage is FaultKind.SWAP else 1

    @property
    def n_damaged(self) -> int:
        """Of two rooms, only the second takes the other's slot or pages."""
        return 1 if self.place is Place.POOL else self.n_rooms


def cases(components: Sequence[str], damages: Sequence[str], places: Sequence[str]) -> list[Case]:
    """Every case there is. Wrong claims have one place."""
    return [
        Case(component, damage, place)
        for component in components
        for damage in DAMAGES
        for place in PLACES
        if damage in damages and place in places and (damage in STATE or place is Place.PLAN)
    ]


class Bench:
    """Puts cases through a running pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._random = random.Random(0)

    async def warm_up(self) -> None:
        """A healthy request: ``stale`` needs a room before. Raises :class:`ClusterFailed` if it is not answered."""
        self._pair.arm()
        if (outcome := await self._ask()).end is not End.ANSWERED:
            raise ClusterFailed(f"a request without any fault failed: {outcome}")

    async def detector(self, case: Case, off: Check | None = None) -> str:
        """The check that refused ``case``, :data:`NONE`, or what was wrong with the refusal."""
        unchecked = [] if off is None else [f"unchecked:{off}"]
        on_decode = case.place is Place.MEMORY
        self._pair.arm(
            prefill=unchecked if on_decode else [case.fault, *unchecked],
            decode=[case.fault, *unchecked] if on_decode else unchecked,
        )
        before = self._pair.totals("pd_check_failures_total")
        outcomes = await asyncio.gather(*(self._ask() for _ in range(case.n_rooms)))
        found = self._pair.totals("pd_check_failures_total") - before
        refused = [outcome.error.get("component") or str(outcome) for outcome in outcomes if outcome.error]
        if not refused and not found:
            return NONE
        checks = {check for check, _ in found}
        is_by_name = set(refused) == {component for _, component in found} == {case.component}
        if not is_by_name or len(checks) != 1 or not len(refused) == found.total() == case.n_damaged:
            return f"unclear: errors name {refused}, checks {sorted(found.elements())}"
        return checks.pop()

    async def _ask(self) -> Outcome:
        prompt = self._random.choices(range(10, 500), k=N_TOKENS)
        body = {"model": "tiny-dsv4", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        return await ask(self._pair.d.url, Question("/v1/completions", body), timeout_s=_TIMEOUT_S)


@dataclass(frozen=True)
class Matrix:
    """Who noticed each case with every check on, and with one of them off."""

    with_all: dict[Case, str]
    without: dict[tuple[Check, Case], str]

    @property
    def changed(self) -> dict[tuple[Check, Case], str]:
        """The cases that somebody else notices, or nobody, when a check is off."""
        return {(off, case): found for (off, case), found in self.without.items() if found != self.with_all[case]}


async def measure(pair: Pair, wanted: Sequence[Case], checks: Sequence[Check], console: Console) -> Matrix:
    """Puts every case through the pair, with every check and without each of ``checks``."""
    bench = Bench(pair)
    with_all: dict[Case, str] = {}
    without: dict[tuple[Check, Case], str] = {}
    await bench.warm_up()
    for case in track(wanted, "every check on", console=console):
        with_all[case] = await bench.detector(case)
    for off in checks:
        for case in track(wanted, f"{off} off", console=console):
            without[off, case] = await bench.detector(case, off)
    await bench.warm_up()
    return Matrix(with_all, without)


def first_table(found: dict[Case, str]) -> str:
    """One row per component and damage, one column per place."""
    lines = [
        "| component | damage | " + " | ".join(WHERE.values()) + " |",
        "|---|---|" + "---|" * len(PLACES),
    ]
    rows = dict.fromkeys((case.component, case.damage) for case in found)
    for component, damage in rows:
        cells = [found.get(Case(component, damage, place), "") for place in PLACES]
        shown = [cell if cell in list(Check) else f"**{cell}**" if cell else "-" for cell in cells]
        lines.append(f"| `{component}` | {damage} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def second_table(found: dict[tuple[Check, Case], str], components: Sequence[str]) -> str:
    """Cases with the same end in one row: the check that was off, where, which damages, which components."""
    damaged: dict[tuple[Check, str, Place, FaultKind], list[str]] = {}
    for (off, case), detector in found.items():
        damaged.setdefault((off, detector, case.place, case.damage), []).append(case.component)
    rows: dict[tuple[Check, str, tuple[str, ...]], dict[Place, list[FaultKind]]] = {}
    for (off, detector, place, damage), components_of in damaged.items():
        rows.setdefault((off, detector, tuple(components_of)), {}).setdefault(place, []).append(damage)
    lines = ["| check that is off | damage, and where | component | what still notices |", "|---|---|---|---|"]
    for (off, detector, names), places in sorted(rows.items()):
        by_damages: dict[tuple[FaultKind, ...], list[Place]] = {}
        for place, kinds in places.items():
            by_damages.setdefault(tuple(kinds), []).append(place)
        parts = (f"{', '.join(kinds)} {_and(WHERE[place] for place in at)}" for kinds, at in by_damages.items())
        lines.append(f"| {off} | {'; '.join(parts)} | {_names(names, components)} | {detector} |")
    return "\n".join(lines)


def _and(words: Iterable[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


def _names(names: Sequence[str], everything: Sequence[str]) -> str:
    others = [f"`{name}`" for name in everything if name not in names]
    if not others:
        return "every one"
    return f"every one but {_and(others)}" if len(others) < len(names) else _and(f"`{name}`" for name in names)


def report(matrix: Matrix, components: Sequence[str]) -> str:
    """Both tables."""
    same = len(matrix.without) - len(matrix.changed)
    words = (
        f"Each check switched off in turn, for every case: {len(matrix.without)} runs. In {same} of them the check "
        f"of the table above noticed it all the same. In the other {len(matrix.changed)}:"
    )
    return f"{first_table(matrix.with_all)}\n\n{words}\n\n{second_table(matrix.changed, components)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--components", nargs="+", choices=COMPONENTS, default=COMPONENTS, help="what to damage")
    parser.add_argument("--damages", nargs="+", choices=DAMAGES, default=DAMAGES, help="how")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES, help="where")
    parser.add_argument(
        "--off", nargs="*", choices=list(Check), default=list(Check), help="checks to switch off in turn"
    )
    parser.add_argument("--only", choices=("sent", "cached"), help="damage to what is sent, or to what is cached")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {FAILURES.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    return exit_code("matrix", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes the tables; the exit code."""
    options = ["--log-level", "error", "--permute-ids", "1"]
    with Pair(LOGS, options, [*options, "--spec-tokens", "3"], prefix="matrix-", faulty=True).running() as pair:
        parts = [part for part in (_sent, _cached) if args.only in (None, part.__name__.strip("_"))]
        unnoticed = [line for part in parts for line in part(pair, args)]
    for line in unnoticed:
        print(f"matrix: {line}", file=sys.stderr)
    return 1 if unnoticed else 0


def _sent(pair: Pair, args: argparse.Namespace) -> list[str]:
    """Damage to what is sent: what was not noticed by name, in words."""
    wanted = cases(args.components, args.damages, args.places)
    matrix = asyncio.run(measure(pair, wanted, [Check(off) for off in args.off], Console(stderr=True)))
    _show(report(matrix, args.components), DETECTORS if args.write else None)
    green = [case for case in wanted if matrix.with_all[case] not in list(Check)]
    return [f"{case.fault} was not noticed by name: {matrix.with_all[case]}" for case in green]


def _cached(pair: Pair, args: argparse.Namespace) -> list[str]:
    """Damage to what is cached: what harmed a client, in words."""
    matrix = prefix_matrix.measured(pair, [Check(off) for off in args.off], Console(stderr=True))
    _show(prefix_matrix.report(matrix), prefix_matrix.PREFIXES if args.write else None)
    return [f"{case.fault} on {case.node}: the answer is {matrix.seen[(), case].answer}" for case in matrix.harmful]


def _show(text: str, section: Section | None) -> None:
    print(text)
    if section is not None:
        section.write(text)
