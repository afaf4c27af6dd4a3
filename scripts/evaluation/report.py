"""Figures of a gsm8k run, and their two forms: a JSON document and a text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .client import Answer, accept_length
from .questions import Problem, last_number, marked_number

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Run:
    """One endpoint's answers to ``problems``, in the same order, and the wall-clock seconds they took together."""

    base_url: str
    model: str
    problems: Sequence[Problem]
    answers: Sequence[Answer]
    wall_s: float

    @property
    def right(self) -> list[bool]:
        """Strictly right: no error, and the number after ``####`` is the expected one."""
        return [
            answer.error is None and marked_number(answer.text) == problem.gold
            for problem, answer in zip(self.problems, self.answers, strict=True)
        ]

    @property
    def accuracy(self) -> float:
        """Share of questions that are strictly right; an error counts as wrong."""
        return sum(self.right) / len(self.right)

    @property
    def accept_length(self) -> float | None:
        return accept_length(self.answers)

    @property
    def errors(self) -> list[tuple[Problem, str]]:
        return [(p, a.error) for p, a in zip(self.problems, self.answers, strict=True) if a.error is not None]

    @property
    def served_by(self) -> Counter[str]:
        """Answers by prefill node, from the header ``x-pd-prefill``; ``(no header)`` where it was missing."""
        return Counter(answer.prefill or "(no header)" for answer in self.answers if answer.error is None)


@dataclass(frozen=True)
class Difference:
    """One question that two endpoints answered differently. ``position`` is the first differing character."""

    problem: Problem
    ours: Answer
    theirs: Answer
    position: int


def differences(run: Run, baseline: Run) -> list[Difference]:
    """Every question whose text, finish reason or success differs. A question without an answer equals nothing."""
    found = []
    for problem, ours, theirs in zip(run.problems, run.answers, baseline.answers, strict=True):
        equal = (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        if not equal or ours.error or theirs.error:
            found.append(Difference(problem, ours, theirs, _first_difference(ours.text, theirs.text)))
    return found


def as_json(run: Run) -> dict[str, Any]:
    """Everything about one run, with one record per question. Times are in seconds."""
    right = run.right
    ok = [answer for answer in run.answers if answer.error is None]
    return {
        "base_url": run.base_url,
        "model": run.model,
        "questions": len(run.problems),
        "accuracy": run.accuracy,
        "accuracy_by_kind": _accuracy_by_kind(run.problems, right),
        "lenient_accuracy": _share(
            a.error is None and last_number(a.text) == p.gold for p, a in zip(run.problems, run.answers, strict=True)
        ),
        "invalid": sum(marked_number(answer.text) is None for answer in ok),
        "errors": len(run.errors),
        "accept_length": run.accept_length,
        "served_by": dict(run.served_by),
        "ttft_s": _percentiles(a.ttft_s for a in ok),
        "intervals": {"answers": sum(a.has_intervals for a in ok), "measured": sum(a.intervals_are_known for a in ok)},
        "tpot_s": _percentiles(a.tpot_s for a in ok),
        "itl_s": _percentiles(gap for a in ok for gap in a.itl_s),
        "latency_s": _percentiles(a.total_s for a in ok),
        "output_tokens_per_s_per_request": _percentiles(a.completion_tokens / a.total_s for a in ok),
        "prompt_tokens": sum(a.prompt_tokens for a in ok),
        "completion_tokens": sum(a.completion_tokens for a in ok),
        "wall_s": run.wall_s,
        "output_tokens_per_s": sum(a.completion_tokens for a in ok) / run.wall_s,
        "requests_per_s": len(ok) / run.wall_s,
        "rows": [_row(p, a, r) for p, a, r in zip(run.problems, run.answers, right, strict=True)],
    }


def print_run(console: Console, name: str, figures: dict[str, Any]) -> None:
    """The figures of :func:`as_json` as two short tables."""
    n = figures["questions"]
    console.print(f"\n[bold]{name}[/bold] {figures['base_url']} ({figures['model']})", highlight=False)
    console.print(
        f"accuracy {figures['accuracy']:.3f} ({round(figures['accuracy'] * n)} of {n}), invalid {figures['invalid']}, "
        f"errors {figures['errors']}, last-number accuracy {figures['lenient_accuracy']:.3f}",
        highlight=False,
    )
    for kind, share in figures["accuracy_by_kind"].items():
        console.print(f"  {kind}: {share['accuracy']:.3f} of {share['questions']}", highlight=False)
    if figures["accept_length"] is not None:
        console.print(f"accept length {figures['accept_length']:.3f} (1 + accepted drafts a step)", highlight=False)
    served = ", ".join(f"{who}: {count}" for who, count in figures["served_by"].items())
    console.print(f"prefill by {served or 'nobody'}", highlight=False)
    table = Table("", *(f"p{p}" for p in PERCENTILES))
    for label, key, scale in (
        ("TTFT ms", "ttft_s", 1e3),
        ("TPOT ms", "tpot_s", 1e3),
        ("ITL ms", "itl_s", 1e3),
        ("latency ms", "latency_s", 1e3),
        ("tokens/s per request", "output_tokens_per_s_per_request", 1.0),
    ):
        cells = [figures[key].get(f"p{p}") for p in PERCENTILES]
        table.add_row(label, *("not measured" if cell is None else f"{cell * scale:.1f}" for cell in cells))
    console.print(table)
    n_answers, n_measured = figures["intervals"]["answers"], figures["intervals"]["measured"]
    if n_measured < n_answers:
        console.print(
            f"TPOT and ITL are those of {n_measured} of {n_answers} answers: of the others most pieces came together, "
            "as on a machine with too much to do",
            highlight=False,
        )
    console.print(
        f"{figures['completion_tokens']} tokens in {figures['wall_s']:.1f} s: "
        f"{figures['output_tokens_per_s']:.1f} tokens/s, {figures['requests_per_s']:.2f} requests/s",
        highlight=False,
    )


def print_differences(console: Console, found: Sequence[Difference], n_questions: int) -> None:
    """How many answers are equal, and the first one that is not, from a little before where it departs."""
    console.print(f"\nequal answers: {n_questions - len(found)} of {n_questions}", highlight=False)
    if not found:
        return
    first = found[0]
    console.print(f"first difference: question {first.problem.index}, character {first.position}", highlight=False)
    for who, answer in (("  ours    ", first.ours), ("  baseline", first.theirs)):
        start = max(0, first.position - 40)
        shown = f"error: {answer.error}" if answer.error else repr(answer.text[start : first.position + 80])
        console.print(f"{who} {shown} (finish reason {answer.finish_reason})", markup=False, highlight=False)


_OF_AN_ANSWER = (
    *("text", "error", "finish_reason", "prefill", "room"),
    *("prompt_tokens", "completion_tokens", "ttft_s", "total_s"),
)


def _row(problem: Problem, answer: Answer, right: bool) -> dict[str, Any]:
    row = {"index": problem.index, "kind": problem.kind, "right": right, "expected": str(problem.gold)}
    return row | {name: getattr(answer, name) for name in _OF_AN_ANSWER}


def _accuracy_by_kind(problems: Sequence[Problem], right: Sequence[bool]) -> dict[str, dict[str, float]]:
    kinds: dict[str, list[bool]] = {}
    for problem, is_right in zip(problems, right, strict=True):
        if problem.kind is not None:
            kinds.setdefault(problem.kind, []).append(is_right)
    return {kind: {"accuracy": _share(rights), "questions": len(rights)} for kind, rights in sorted(kinds.items())}


def _share(flags: Iterable[bool]) -> float:
    listed = list(flags)
    return sum(listed) / len(listed)


def _percentiles(values: Iterable[float | None]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    if not known:
        return {}
    return {f"p{p}": float(np.percentile(known, p)) for p in PERCENTILES}


def _first_difference(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
