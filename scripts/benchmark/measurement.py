"""What the benchmark collects: streams of tokens, values by variant, and ratios of medians."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Prompt = tuple[int, ...]
"""Token ids."""
CONFIDENCE = 0.95
VERSION = 2
"""Of the JSON report."""


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
        n_events = bisect_right(self.times_s, time_s)
        return self.counts[n_events - 1] if n_events else 0

    def gaps_s(self, start_s: float, stop_s: float) -> list[float]:
        """Times between arrivals that follow each other, both within ``start_s .. stop_s``. What comes in one read is
        one arrival.
        """
        times = [t for t in dict.fromkeys(self.times_s) if start_s <= t <= stop_s]
        return [b - a for a, b in pairwise(times)]


def decoding_at_once(streams: Sequence[Stream]) -> tuple[float, float, int]:
    """From the last first token to the first end: both times, and the tokens of all streams between them (0: never)."""
    start = max(stream.times_s[0] for stream in streams)
    stop = min(stream.times_s[-1] for stream in streams)
    return start, stop, sum(stream.count_at(stop) - stream.count_at(start) for stream in streams) if stop > start else 0


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens per second of all streams together while all of them decode, so that no rate holds the time of a prompt.

    Raises :class:`BenchFailed` if they never decode all at once.
    """
    start, stop, n_tokens = decoding_at_once(streams)
    if n_tokens < 1:
        raise BenchFailed(f"{len(streams)} requests never decoded all at once, with {streams[0].n_tokens} tokens each")
    return n_tokens / (stop - start)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` % of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def n_beyond(n_values: int) -> int:
    """The largest k for which the k-th smallest and the k-th largest of so many values have their true median between
    them with a probability of at least 95 % (as of that many tosses of a coin fewer than k show the same side); or 0.
    """
    tail = 0
    for k in range(n_values // 2):
        tosses = math.comb(n_values, k)
        if (tail + tosses) / 2**n_values > (1 - CONFIDENCE) / 2:
            return k
        tail += tosses
    return 0


@dataclass
class Measurement:
    """One quantity in several variants, measured in turn. ``part`` and ``size`` say what it is of.

    ``ratios`` and ``differences`` are the pairs of variants to report, of their medians. ``notes`` say, by variant,
    what was not or not fully measured and why; ``details`` are further figures for the report alone.
    """

    part: str
    name: str
    unit: str
    ratios: tuple[tuple[str, str], ...] = ()
    differences: tuple[tuple[str, str], ...] = ()
    size: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, variant: str, value: float) -> None:
        self.values.setdefault(variant, []).append(value)

    def median(self, variant: str) -> float:
        return median(self.values[variant])

    def ratio(self, numerator: str, denominator: str) -> float:
        return self.median(numerator) / self.median(denominator)

    def interval(self, numerator: str, denominator: str) -> tuple[float, float] | None:
        """Between which two the median of the rounds' own ratios lies, with a probability of at least 95 %, whatever
        their distribution is. None for fewer than six rounds, or other numbers of rounds of each.
        """
        pair = self.values[numerator], self.values[denominator]
        if len(pair[0]) != len(pair[1]):
            return None
        ratios = sorted(a / b for a, b in zip(*pair, strict=True))
        n_outside = n_beyond(len(ratios))
        return (ratios[n_outside - 1], ratios[-n_outside]) if n_outside else None

    def both(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of ``pairs`` that were measured."""
        return [pair for pair in pairs if all(name in self.values for name in pair)]

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "name": self.name,
            "size": self.size,
            "unit": self.unit,
            "variants": {
                name: {"median": median(values), "min": min(values), "max": max(values), "values": values}
                for name, values in self.values.items()
            },
            "ratios": {f"{a} / {b}": self.ratio(a, b) for a, b in self.both(self.ratios)},
            "intervals": {f"{a} / {b}": self.interval(a, b) for a, b in self.both(self.ratios)},
            "differences": {f"{a} - {b}": self.median(a) - self.median(b) for a, b in self.both(self.differences)},
            "notes": self.notes,
            "details": self.details,
        }


def write_json(path: Path, setting: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    """One line for each measurement."""
    lines = ",\n".join(json.dumps(_rounded(m.as_json())) for m in measurements)
    text = f'{{"version": {VERSION},\n"setting": {json.dumps(_rounded(setting))},\n"measurements": [\n{lines}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Floats with six digits: more is noise, and a report is read."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
