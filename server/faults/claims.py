"""Fault injection in what the prefill node claims: components that a batch does not tell the truth about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.faults.spec import Fault, FaultKind, Place


@dataclass(frozen=True)
class Lies:
    """``unsent`` components are not sent, ``unclaimed`` not claimed, ``miscounted`` claimed with one row's bytes too
    few. Empty in production.
    """

    unsent: frozenset[str] = frozenset()
    unclaimed: frozenset[str] = frozenset()
    miscounted: frozenset[str] = frozenset()

    @staticmethod
    def of(struck: Iterable[Fault]) -> Lies:
        dropped, forgotten, miscounted = (
            frozenset(f.component for f in struck if f.kind is kind and f.place in (None, Place.PLAN))
            for kind in (FaultKind.DROP, FaultKind.FORGET, FaultKind.MISCOUNT)
        )
        return Lies(dropped | forgotten, forgotten, miscounted)
