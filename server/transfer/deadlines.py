"""Deadlines as an operator gives them: ``PHASE=SECONDS``, one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from server.transfer.rooms import Deadlines

_INTERVALS = ("ping_s", "resend_s", "resend_cap_s")
"""How often something is said again: no phase, and not for an operator to choose."""

PHASES = tuple(field.name.removesuffix("_s") for field in fields(Deadlines) if field.name not in _INTERVALS)


class DeadlineError(Exception):
    """A deadline that cannot be set, with what was wrong and what can."""


def parse_deadlines(assignments: Iterable[str]) -> Deadlines:
    """The defaults, changed by ``PHASE=SECONDS`` assignments; of two for one phase the later counts.

    Pings follow a short ``peer`` deadline, so that three fit into it. Raises :class:`DeadlineError`.
    """
    seconds = dict(_parse(assignment) for assignment in assignments)
    if (peer_s := seconds.get("peer_s")) is not None:
        seconds["ping_s"] = min(Deadlines.ping_s, peer_s / 3)
    return Deadlines(**seconds)


def _parse(assignment: str) -> tuple[str, float]:
    phase, _, text = assignment.partition("=")
    if phase not in PHASES:
        raise DeadlineError(f"--deadline {assignment}: no phase {phase!r}; there are {', '.join(PHASES)}")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise DeadlineError(f"--deadline {assignment}: {text!r} is no number of seconds above 0")
    return f"{phase}_s", seconds
