"""What the benchmark collects: streams of tokens, values by variant, and ratios of medians."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

Prompt = tuple[int, ...]
"""Token ids."""


class BenchFailed(Exception):
    """A measurement cannot be taken. The message says why and what to change."""


@dataclass
class Stream:
    """When tokens of one answer came: ``counts[i]`` in all at ``times_s[i]`` (any clock, the same for all streams)."""

    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, time_s: float, n_tokens: int) -> None:
        """Notes that the answer has ``n_tokens`` tokens since ``time_s``; nothing if it had them before."""
        if n_tokens > self.n_tokens:
            self.times_s.append(time_s)
            self.counts.append(n_tokens)

    @property
    def n_tokens(self) -> int:
        return self.counts[-1] if self.counts else 0

    def count_at(self, time_s: float) -> int:
        return max((n for t, n in zip(self.times_s, self.counts, strict=True) if t <= time_s), default=0)


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens per second of all streams together while all of them decode: from the last first token to the first end.

    So no rate holds the time of a prompt. Raises :class:`BenchFailed` if they never decode all at once.
    """
    start = max(stream.times_s[0] for stream in streams)
    stop = min(stream.times_s[-1] for stream in streams)
    n_tokens = sum(stream.count_at(stop) - stream.count_at(start) for stream in streams)
    if stop <= start or n_tokens < 1:
        raise BenchFailed(f"{len(streams)} requests never decoded all at once: raise --decode-tokens")
    return n_tokens / (stop - start)


@dataclass
class Measurement:
    """One quantity in several variants, measured in turn. ``ratios``: the pairs (numerator, denominator) to report."""

    name: str
    unit: str
    ratios: tuple[tuple[str, str], ...]
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, variant: str, value: float) -> None:
        self.values.setdefault(variant, []).append(value)

    def median(self, variant: str) -> float:
        return median(self.values[variant])

    def ratio(self, numerator: str, denominator: str) -> float:
        return self.median(numerator) / self.median(denominator)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "variants": {
                name: {"median": median(values), "min": min(values), "max": max(values), "values": values}
                for name, values in self.values.items()
            },
            "ratios": {f"{a} / {b}": self.ratio(a, b) for a, b in self.ratios},
        }


def print_table(console: Console, measurements: Sequence[Measurement]) -> None:
    """Medians with their spread, then the ratios of medians."""
    values = Table("measurement", "variant", "median", "min", "max", "unit", title="values")
    ratios = Table("measurement", "ratio of medians", "", title="ratios")
    for table, columns in ((values, (2, 3, 4)), (ratios, (2,))):
        for column in columns:
            table.columns[column].justify = "right"
    for m in measurements:
        for name, found in m.values.items():
            spread = (median(found), min(found), max(found))
            values.add_row(m.name, name, *(f"{x:,.3g}" if x < 100 else f"{x:,.0f}" for x in spread), m.unit)
        for a, b in m.ratios:
            ratios.add_row(m.name, f"{a} / {b}", f"{m.ratio(a, b):.3f}")
    console.print(values)
    console.print(ratios)


def write_json(path: Path, setting: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    report = {"version": 1, "setting": setting, "measurements": [m.as_json() for m in measurements]}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
