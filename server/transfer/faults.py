"""Faults on purpose: hooks that the nodes ask, off by default, so that every check can be seen to fire.

A fault is written ``KIND:COMPONENT[:COUNT]``, for example ``drop:swa`` or ``drop:swa:1`` (the first room only).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence

from server.cache.live import LIVE_RULES

log = logging.getLogger(__name__)


class FaultError(ValueError):
    """A fault that does not exist or is not written right."""


class FaultKind(enum.StrEnum):
    """What is done to a component."""

    DROP = "drop"
    """The prefill node does not send it, and claims that it did."""


class Fault:
    """One fault; ``left`` is the number of rooms it will still strike, None for all."""

    def __init__(self, kind: FaultKind, component: str, count: int | None = None) -> None:
        self.kind, self.component, self.left = kind, component, count

    def __str__(self) -> str:
        return f"{self.kind}:{self.component}"

    def strike(self) -> bool:
        """Whether it strikes this room."""
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


class FaultSet:
    """The faults of one process. Empty in production."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        for fault in self.faults:
            log.warning("FAULT INJECTION is on: %s", fault)

    @staticmethod
    def parse(specs: Sequence[str]) -> FaultSet:
        """From the command line. Raises :class:`FaultError` for an unknown kind or component."""
        return FaultSet([_parse(spec) for spec in specs])

    def drops(self, room: str) -> frozenset[str]:
        """The components that ``room`` (for the log) will not get."""
        dropped = [fault for fault in self.faults if fault.kind is FaultKind.DROP and fault.strike()]
        for fault in dropped:
            log.warning("FAULT INJECTION strikes %s: %s", room, fault)
        return frozenset(fault.component for fault in dropped)


def _parse(spec: str) -> Fault:
    kind, _, rest = spec.partition(":")
    component, _, count = rest.partition(":")
    if kind not in list(FaultKind):
        raise FaultError(f"fault {spec!r}: no kind {kind!r}; there are {', '.join(FaultKind)}")
    if component not in LIVE_RULES:
        raise FaultError(f"fault {spec!r}: no component {component!r}; there are {', '.join(LIVE_RULES)}")
    if count and not count.isdecimal():
        raise FaultError(f"fault {spec!r}: {count!r} is no number of rooms")
    return Fault(FaultKind(kind), component, int(count) if count else None)
