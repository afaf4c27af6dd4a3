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

from cluster import LOGS, ROOT, ClusterFailed, Pair, StopRequested, StopSignals
from rich.console import Console
from rich.progress import track

from .client import Answer, ServerDied, ask_bundled_model
from .questions import STOP, Problem, bundled_questions, marked_number

READY_TIMEOUT_S = 180.0
DOC = ROOT / "docs" / "failures.md"
BEGIN, END = "<!-- knock-out table: begin -->", "<!-- knock-out table: end -->"
COMPONENTS = (
    "c4_kv", "c4_index", "c128_kv", "swa", "c4_state_a", "c4_state_b", "c4_index_state_a", "c4_index_state_b",
    "c128_state", "draft_swa", "handoff",
)  # fmt: skip
DAMAGES = ("drop", "zero", "stale", "shift")


@dataclass(frozen=True)
class Figures:
    """One pass over the questions. Accept lengths are 1 + accepted drafts a step, overall and in the first tokens."""

    answers: Sequence[Answer]
    accuracy: float
    accept_length: float
    early_accept_length: float


@dataclass(frozen=True)
class Row:
    """One damage to one component: what the checks said, and what happened without them (None: nothing to measure)."""

    component: str
    damage: str
    refused_as: str
    without_checks: Figures | None
    changed: int = 0


class Bench:
    """A running pair, and the questions that it is asked."""

    def __init__(self, pair: Pair, questions: Sequence[tuple[Problem, str]]) -> None:
        self._pair = pair
        self._problems, self._prompts = zip(*questions, strict=True)

    def set_faults(self, sender: str, *, checks: bool) -> None:
        self._pair.arm(prefill=[sender] if sender else [], decode=[] if checks else ["unchecked"])

    def measure(self, *, long: bool = False) -> Figures:
        """Asks every question; ``long`` lets the model write on behind its answer, for 128 tokens."""
        max_tokens, stop = (128, ()) if long else (64, STOP)
        before = self._accept_sums()
        answers = ask_bundled_model(self._pair.d.url, self._prompts, 4, max_tokens, stop)
        after = self._accept_sums()
        right = [
            a.error is None and marked_number(a.text) == p.gold for p, a in zip(self._problems, answers, strict=True)
        ]
        sums = [b - a for a, b in zip(before, after, strict=True)]
        return Figures(answers, sum(right) / len(right), sums[0] / max(sums[1], 1), sums[2] / max(sums[3], 1))

    def refusal(self) -> str:
        """The error of two requests (``stale`` needs a room before), or "not refused"."""
        errors = [answer.error for answer in ask_bundled_model(self._pair.d.url, self._prompts[:2], 1)]
        return errors[-1] or "not refused"

    def _accept_sums(self) -> list[float]:
        """Sum and count of both accept length histograms."""
        metrics = self._pair.d.metrics()
        names = ("pd_accept_length", "pd_accept_length_early")
        return [metrics.get(f"{name}_{part}", 0.0) for name in names for part in ("sum", "count")]


def run_all(
    bench: Bench, components: Sequence[str], damages: Sequence[str], console: Console
) -> tuple[Figures, list[Row]]:
    """The healthy run, then every damage with checks and without."""
    bench.set_faults("", checks=True)
    healthy = bench.measure()
    rows = []
    cases = [(c, damage) for c in components for damage in damages]
    for component, damage in track(cases, "damages", console=console):
        bench.set_faults(f"{damage}:{component}", checks=True)
        refused = bench.refusal()
        if component == "handoff":  # without the row there is no first token, checks or not
            rows.append(Row(component, damage, refused, None))
            continue
        bench.set_faults(f"{damage}:{component}", checks=False)
        figures = bench.measure()
        changed = sum(a.text != b.text for a, b in zip(figures.answers, healthy.answers, strict=True))
        rows.append(Row(component, damage, refused, figures, changed))
    bench.set_faults("", checks=True)
    return healthy, rows


def draft_rows(bench: Bench, damages: Sequence[str], console: Console) -> list[tuple[str, Figures, int]]:
    """The draft's window lost before long answers, checks off: damage, figures, and answers changed; healthy first."""
    bench.set_faults("", checks=True)
    healthy = bench.measure(long=True)
    rows = [("none", healthy, 0)]
    for damage in track(damages, "long answers", console=console):
        bench.set_faults(f"{damage}:draft_swa", checks=False)
        figures = bench.measure(long=True)
        changed = sum(a.text != b.text for a, b in zip(figures.answers, healthy.answers, strict=True))
        rows.append((damage, figures, changed))
    bench.set_faults("", checks=True)
    return rows


def draft_table(rows: Sequence[tuple[str, Figures, int]], n_questions: int) -> str:
    """The markdown table of :func:`draft_rows`, with each accept length's distance from the healthy one."""
    healthy = rows[0][1]
    lines = [
        "| damage to `draft_swa` | answers changed | accept length | in the first 32 tokens |",
        "|---|---|---|---|",
    ]
    for damage, f, changed in rows:
        overall = f"{f.accept_length:.2f} ({f.accept_length / healthy.accept_length - 1:+.0%})"
        early = f"{f.early_accept_length:.2f} ({f.early_accept_length / healthy.early_accept_length - 1:+.0%})"
        lines.append(f"| {damage} | {changed} of {n_questions} | {overall} | {early} |")
    return "\n".join(lines)


def table(healthy: Figures, rows: Sequence[Row], n_questions: int) -> str:
    """The markdown table."""
    lines = [
        "| component | damage | checks on: the request fails, naming | checks off: accuracy | answers changed | "
        "accept length | in the first 32 tokens |",
        "|---|---|---|---|---|---|---|",
        f"| (healthy) | none | - | {healthy.accuracy:.2f} | 0 of {n_questions} | {healthy.accept_length:.2f} | "
        f"{healthy.early_accept_length:.2f} |",
    ]
    for row in rows:
        named = f"`{row.component}`" if row.component in row.refused_as else f"**{row.refused_as}**"
        measured = "no first token | - | - | -"
        if (f := row.without_checks) is not None:
            lengths = f"{f.accept_length:.2f} | {f.early_accept_length:.2f}"
            measured = f"{f.accuracy:.2f} | {row.changed} of {n_questions} | {lengths}"
        lines.append(f"| `{row.component}` | {row.damage} | {named} | {measured} |")
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
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOC.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    questions = random.Random(0).sample(bundled_questions(), args.questions)
    options = ("--log-level", "error")
    pair = Pair(LOGS, options, (*options, "--spec-tokens", str(args.spec_tokens)), prefix="knockout-", faulty=True)
    try:
        with StopSignals(), pair.running(READY_TIMEOUT_S):
            bench = Bench(pair, questions)
            healthy, rows = run_all(bench, args.components, args.damages, console)
            long_rows = draft_rows(bench, args.damages, console)
    except (ClusterFailed, ServerDied) as error:
        print(f"knockout: {error}", file=sys.stderr)
        return 2
    except StopRequested:
        return 130
    made = f"{table(healthy, rows, len(questions))}\n\nThe same, where the model writes on for 128 tokens:\n\n"
    made += draft_table(long_rows, len(questions))
    print(made)
    if args.write:
        text = DOC.read_text(encoding="utf-8")
        head, _, rest = text.partition(BEGIN)
        DOC.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    silent = [row for row in rows if row.component not in row.refused_as]
    for row in silent:
        print(f"knockout: {row.damage} of {row.component} was not refused by name: {row.refused_as}", file=sys.stderr)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
