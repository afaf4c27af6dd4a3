"""docs/lifecycle.md as data: the steps of a request, and the files that run beside its way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"^\| *(\d+)(?: \(after (\d+)\))? *\| *([PD]) *\|(.*?)\|", re.MULTILINE)
_PLACE = re.compile(r"`(server/[\w/]+\.py)::([\w.]+)`")
_BESIDE = re.compile(r"^- `(server/[\w/]+\.py)`", re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """A function on the way."""

    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}::{self.function}"


@dataclass(frozen=True)
class Step:
    """One row of the table: ``node`` is ``P`` or ``D``; the places in the order in which they run, after the step
    number ``after``.
    """

    number: int
    after: int
    node: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Page:
    """The document. ``beside`` are the files that run for every request and that nobody has to read to follow it."""

    steps: tuple[Step, ...]
    beside: frozenset[str]

    @staticmethod
    def read(path: Path) -> Page:
        text = path.read_text(encoding="utf-8")
        steps = [
            Step(
                int(number), int(after or int(number) - 1), node, tuple(Place(*each) for each in _PLACE.findall(places))
            )
            for number, after, node, places in _STEP.findall(text)
        ]
        return Page(tuple(steps), frozenset(_BESIDE.findall(text)))
