"""What each lost state component does: refused by name with the checks on, and measured with the checks off.

Starts one prefill and one decode process with speculative decoding, asks the bundled questions, and puts every
component through every damage (the prefill node sends nothing, zeros, the rows of the room before, or rows shifted by
one). With ``--write`` the table goes between its markers in docs/failures.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from cluster import LOGS, ROOT, Pair
from cluster.tool import FAILURES, Section, exit_code
from rich.console import Console
from rich.progress import track

from server.model.config import load_config
from server.model.state import state_components
from server.node.options import BUNDLED_MODEL

from .client import Answer, ServerDied, ask_bundled_model
from .questions import STOP, Problem, bundled_questions, marked_number

READY_TIMEOUT_S = 180.0
KNOCK_OUTS = Section("knock-out table")
COMPONENTS = tuple(each.name for each in state_components(load_config(BUNDLED_MODEL), "float32", draft=True))
DAMAGES = ("drop", "zero", "stale", "shift")


@dataclass(frozen=True)
class Figures:
    """One pass over the questions. Accept lengths are 1 + accepted drafts a step, overall and in the first tokens."""

    answers: Sequence[Answer]
    accuracy: float
    accept_length: float
    early_accept_length: float

    def changed_from(self, healthy: Figures) -> str:
        changed = sum(a.text != b.text for a, b in zip(self.answers, healthy.answers, strict=True))
        return f"{changed} of {len(self.answers)}"


@dataclass(frozen=True)
class Row:
    """One damage to one component: what the checks said, and what happened without them (None: nothing to measure)."""

    component: str
    damage: str
    refused_as: str
    without_checks: Figures | None


class Bench:
    """A running pair, and the questions that it is asked."""

    def __init__(self, pair: Pair, questions: Sequence[tuple[Problem, str]]) -> None:
        self._pair = pair
        self._problems, self._prompts = zip(*questions, strict=True)

    def measure(self, damage: str = "", component: str = "", *, long: bool = False) -> Figures:
        """Asks every question, with the checks off if something is damaged.

        ``long`` lets the model write on behind its answer, for 128 tokens.
        """
        self._pair.arm(prefill=[f"{damage}:{component}"] if damage else [], decode=["unchecked"] if damage else [])
        max_tokens, stop = (128, ()) if long else (64, STOP)
        before = self._accept_sums()
        answers = ask_bundled_model(self._pair.d.url, self._prompts, 4, max_tokens, stop)
        after = self._accept_sums()
        right = [
            a.error is None and marked_number(a.text) == p.gold for p, a in zip(self._problems, answers, strict=True)
        ]
        sums = [b - a for a, b in zip(before, after, strict=True)]
        return Figures(answers, sum(right) / len(right), sums[0] / max(sums[1], 1), sums[2] / max(sums[3], 1))

    def refusal(self, damage: str, component: str) -> str:
        """The error of two requests (``stale`` needs a room before) with the checks on, or "not refused"."""
        self._pair.arm(prefill=[f"{damage}:{component}"])
        errors = [answer.error for answer in ask_bundled_model(self._pair.d.url, self._prompts[:2], 1)]
        return errors[-1] or "not refused"

    def _accept_sums(self) -> list[float]:
        """Sum and count of both accept length histograms."""
        metrics = self._pair.d.metrics()
        names = ("pd_accept_length", "pd_accept_length_early")
        return [metrics.get(f"{name}_{part}", 0.0) for name in names for part in ("sum", "count")]


def damage_all(bench: Bench, components: Sequence[str], damages: Sequence[str], console: Console) -> list[Row]:
    """Every damage to every component, with checks and without."""
    rows = []
    cases = [(component, damage) for component in components for damage in damages]
    for component, damage in track(cases, "damages", console=console):
        refused = bench.refusal(damage, component)
        # without the hand-off row there is no first token, checks or not
        figures = None if component == "handoff" else bench.measure(damage, component)
        rows.append(Row(component, damage, refused, figures))
    return rows


def table(healthy: Figures, rows: Sequence[Row]) -> str:
    """The markdown table."""
    lines = [
        "| component | damage | checks on: the request fails, naming | checks off: accuracy | answers changed | "
        "accept length | in the first 32 tokens |",
        "|---|---|---|---|---|---|---|",
        f"| (healthy) | none | - | {_measured(healthy, healthy)} |",
    ]
    for row in rows:
        named = f"`{row.component}`" if row.component in row.refused_as else f"**{row.refused_as}**"
        measured = _measured(row.without_checks, healthy) if row.without_checks else "no first token | - | - | -"
        lines.append(f"| `{row.component}` | {row.damage} | {named} | {measured} |")
    return "\n".join(lines)


def _measured(f: Figures, healthy: Figures) -> str:
    return f"{f.accuracy:.2f} | {f.changed_from(healthy)} | {f.accept_length:.2f} | {f.early_accept_length:.2f}"


def draft_table(found: dict[str, Figures]) -> str:
    """The markdown table of long answers by damage, with each accept length's distance from the healthy one."""
    healthy = found["none"]
    lines = [
        "| damage to `draft_swa` | answers changed | accept length | in the first 32 tokens |",
        "|---|---|---|---|",
    ]
    for damage, f in found.items():
        overall = f"{f.accept_length:.2f} ({f.accept_length / healthy.accept_length - 1:+.0%})"
        early = f"{f.early_accept_length:.2f} ({f.early_accept_length / healthy.early_accept_length - 1:+.0%})"
        lines.append(f"| {damage} | {f.changed_from(healthy)} | {overall} | {early} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; exit code 1 if a damage was not refused by its component's name."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=40, metavar="N", help="questions of each measurement")
    parser.add_argument("--spec-tokens", type=int, default=3, metavar="K", help="draft tokens of one step")
    parser.add_argument("--components", nargs="+", choices=COMPONENTS, default=COMPONENTS, help="what to damage")
    parser.add_argument("--damages", nargs="+", choices=DAMAGES, default=DAMAGES, help="how")
    parser.add_argument("--write", action="store_true", help=f"put the table into {FAILURES.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    return exit_code("knockout", lambda: run(args), ServerDied)


def run(args: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes the table; the exit code."""
    console = Console(stderr=True)
    questions = random.Random(0).sample(bundled_questions(), args.questions)
    options = ("--log-level", "error")
    pair = Pair(LOGS, options, (*options, "--spec-tokens", str(args.spec_tokens)), prefix="knockout-", faulty=True)
    with pair.running(READY_TIMEOUT_S):
        bench = Bench(pair, questions)
        healthy = bench.measure()
        rows = damage_all(bench, args.components, args.damages, console)
        long_answers = {"none": bench.measure(long=True)}
        for damage in track(args.damages, "long answers", console=console):
            long_answers[damage] = bench.measure(damage, "draft_swa", long=True)
    made = f"{table(healthy, rows)}\n\nThe same, where the model writes on for 128 tokens:\n\n"
    made += draft_table(long_answers)
    print(made)
    if args.write:
        KNOCK_OUTS.write(made)
    silent = [row for row in rows if row.component not in row.refused_as]
    for row in silent:
        print(f"knockout: {row.damage} of {row.component} was not refused by name: {row.refused_as}", file=sys.stderr)
    return 1 if silent else 0
