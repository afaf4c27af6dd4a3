"""Faults on purpose: hooks that the nodes ask, off by default, so that every check can be seen to fire.

A fault is written ``KIND:COMPONENT[:COUNT]``, for example ``drop:swa`` or ``drop:swa:1`` (the first room only), or just
``unchecked`` (a decode node commits whatever arrived). ``@PATH`` reads faults from a file, one a line, again for every
room, so that one pair of processes can be put through all of them.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from server.cache.live import LIVE_RULES

log = logging.getLogger(__name__)


class FaultError(ValueError):
    """A fault that does not exist or is not written right."""


class FaultKind(enum.StrEnum):
    """What is done to a component, or left out."""

    DROP = "drop"
    """The prefill node does not send it, and claims that it did."""
    ZERO = "zero"
    """The prefill node sends zeros, after it has taken the digest."""
    STALE = "stale"
    """The prefill node sends the rows of the room before, after it has taken the digest."""
    SHIFT = "shift"
    """The prefill node sends every row one place too late, after it has taken the digest."""
    UNCHECKED = "unchecked"
    """The decode node commits without looking: no coverage, no digests. For measuring what the checks are worth."""


DAMAGES = frozenset({FaultKind.ZERO, FaultKind.STALE, FaultKind.SHIFT})
"""Kinds that change what the prefill node holds before it sends."""


class Fault:
    """One fault; ``left`` is the number of rooms it will still strike, None for all."""

    def __init__(self, kind: FaultKind, component: str = "", count: int | None = None) -> None:
        self.kind, self.component, self.left = kind, component, count

    def __str__(self) -> str:
        return f"{self.kind}:{self.component}" if self.component else str(self.kind)

    def strike(self) -> bool:
        """Whether it strikes this room."""
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


class FaultSet:
    """The faults of one process. Empty in production."""

    def __init__(self, faults: Iterable[Fault] = (), files: Iterable[Path] = ()) -> None:
        self.faults = list(faults)
        self._files = tuple(files)
        for fault in [*self.faults, *self._files]:
            log.warning("FAULT INJECTION is on: %s", fault)

    @staticmethod
    def parse(specs: Sequence[str]) -> FaultSet:
        """From the command line. Raises :class:`FaultError` for an unknown kind or component."""
        files = [Path(spec[1:]) for spec in specs if spec.startswith("@")]
        return FaultSet([_parse(spec) for spec in specs if not spec.startswith("@")], files)

    def strike(self, room: str) -> tuple[Fault, ...]:
        """The faults that strike ``room`` (named for the log)."""
        from_files = [_parse(line) for path in self._files if path.is_file() for line in path.read_text().split()]
        struck = tuple(fault for fault in [*self.faults, *from_files] if fault.strike())
        for fault in struck:
            log.warning("FAULT INJECTION strikes %s: %s", room, fault)
        return struck


def _parse(spec: str) -> Fault:
    kind, _, rest = spec.partition(":")
    component, _, count = rest.partition(":")
    if kind not in list(FaultKind):
        raise FaultError(f"fault {spec!r}: no kind {kind!r}; there are {', '.join(FaultKind)}")
    if kind == FaultKind.UNCHECKED:
        if rest:
            raise FaultError(f"fault {spec!r}: {FaultKind.UNCHECKED} takes no component")
        return Fault(FaultKind.UNCHECKED)
    if component not in LIVE_RULES:
        raise FaultError(f"fault {spec!r}: no component {component!r}; there are {', '.join(LIVE_RULES)}")
    if count and not count.isdecimal():
        raise FaultError(f"fault {spec!r}: {count!r} is no number of rooms")
    return Fault(FaultKind(kind), component, int(count) if count else None)
