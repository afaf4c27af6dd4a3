"""The recorded way of one request, compared with the page, and counted."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from walk.page import Page, Place
from walk.recorder import Calls

_CLOCK_NS = 1_000
"""Calls of two processes that are closer than this are taken as simultaneous."""


@dataclass(frozen=True)
class Window:
    """From ``begin`` to ``end`` on the monotonic clock, in nanoseconds."""

    begin: int
    end: int

    def calls(self, at: list[int]) -> list[int]:
        return at[bisect_left(at, self.begin) : bisect_left(at, self.end)]


@dataclass(frozen=True)
class Way:
    """What ran on each node (``P``, ``D``) while one request was answered, without what runs on an idle node too."""

    calls: Mapping[str, Mapping[Place, list[int]]]
    lines: Mapping[Place, int]

    @staticmethod
    def of(recorded: Mapping[str, Iterable[Calls]], idle: Window, request: Window) -> Way:
        calls: dict[str, dict[Place, list[int]]] = {}
        lines: dict[Place, int] = {}
        for node, functions in recorded.items():
            calls[node] = {}
            for function in functions:
                place = Place(function.file, function.function)
                if (at := request.calls(function.at)) and not idle.calls(function.at):
                    calls[node].setdefault(place, []).extend(at)
                    lines[place] = function.n_lines
        return Way(calls, lines)

    @property
    def files(self) -> set[str]:
        return {place.file for places in self.calls.values() for place in places}


def differences(page: Page, way: Way) -> list[str]:
    """Why the page is not true, in sentences: steps that did not run, or in another order, and missing files."""
    found = []
    ended = {0: 0}
    for step in page.steps:
        now = ended[step.after]
        for place in step.places:
            at = sorted(way.calls[step.node].get(place, []))
            later = at[bisect_left(at, now - _CLOCK_NS) :]
            if not at:
                found.append(f"step {step.number}: {place} did not run on {step.node}")
            elif not later:
                found.append(f"step {step.number}: {place} ran before what it follows")
            else:
                now = later[0]
        ended[step.number] = now
    named = {place.file for step in page.steps for place in step.places} | page.beside
    found += [f"{file} ran and is not on the page" for file in sorted(way.files - named)]
    found += [f"{file} is on the page and did not run" for file in sorted(page.beside - way.files)]
    return found


@dataclass(frozen=True)
class Counts:
    """How far one has to walk. A stay is a file that is read until the next one is needed, a return is a stay in a file
    that was left before. ``lines`` are those of all functions that ran for the request in these files, and
    ``lines_beside`` in all others.
    """

    steps: int
    stays: int
    files: int
    returns: int
    folder_changes: int
    lines: int
    files_beside: int
    lines_beside: int

    @staticmethod
    def of(page: Page, way: Way) -> Counts:
        files = [place.file for step in page.steps for place in step.places]
        stays = [file for file, _ in itertools.groupby(files)]
        folders = [folder for folder, _ in itertools.groupby(str(PurePath(file).parent) for file in stays)]
        return Counts(
            steps=len(page.steps),
            stays=len(stays),
            files=len(set(stays)),
            returns=len(stays) - len(set(stays)),
            folder_changes=len(folders) - 1,
            lines=sum(n for place, n in way.lines.items() if place.file in files),
            files_beside=len(page.beside),
            lines_beside=sum(n for place, n in way.lines.items() if place.file not in files),
        )
