"""Which registration of every decode process is current on a prefill node. Those that are over never come back.

A message may be late by any time: the network keeps it, or somebody sends it once more. One of a registration that is
over means memory which has other owners now, so it must find nothing. Therefore

- a decode process numbers its registrations upwards, and every message carries the number;
- only messages of the current registration are obeyed;
- a number that was current once, or is lower than one that was, is never made current again.

Numbers are kept by the connection's routing id too, which a decode process draws for each prefill node and keeps:
nobody else can use up the numbers of a process whose incarnation is known to all.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from server.transfer.protocol import PeerMessage, Registration, registration_of

MAX_REMEMBERED = 4096
"""Connections whose last number is remembered after they are lost; those lost first are forgotten first."""


class Standing(enum.StrEnum):
    """What a ``Register`` is."""

    NEW = "new"
    CURRENT = "current"
    """It was taken before: a copy, or its answer was lost."""
    OVER = "over"
    ELSEWHERE = "elsewhere"
    """The decode process is registered over another connection."""


@dataclass(frozen=True)
class _Current:
    registration: Registration
    routing_id: bytes


class Registrations:
    """Those with the prefill process ``prefill`` (its incarnation)."""

    def __init__(self, prefill: str) -> None:
        self._prefill = prefill
        self._current: dict[str, _Current] = {}
        self._newest: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def judge(self, decode: str, number: int, routing_id: bytes) -> Standing:
        """What to do with a ``Register`` of the process ``decode`` with this ``number``."""
        current = self._current.get(decode)
        if current is not None and current.routing_id != routing_id:
            return Standing.ELSEWHERE
        if current is not None and current.registration.number == number:
            return Standing.CURRENT
        is_new = number > self._newest.get((decode, routing_id), 0)
        return Standing.NEW if is_new else Standing.OVER

    def begin(self, decode: str, number: int, routing_id: bytes) -> Registration:
        """Makes a :attr:`Standing.NEW` one the current one of its process; the one before is over."""
        registration = Registration(self._prefill, decode, number)
        self._current[decode] = _Current(registration, routing_id)
        self._newest[decode, routing_id] = number
        self._newest.move_to_end((decode, routing_id))
        if len(self._newest) > MAX_REMEMBERED:
            self._forget_oldest()
        return registration

    def end(self, registration: Registration) -> None:
        """``registration`` is over; nothing happens if it is not current."""
        current = self._current.get(registration.decode)
        if current is not None and current.registration == registration:
            del self._current[registration.decode]

    def is_current(self, registration: Registration, routing_id: bytes) -> bool:
        """Whether it may be obeyed what comes over ``routing_id`` in the name of ``registration``."""
        return self._current.get(registration.decode) == _Current(registration, routing_id)

    def covers(self, message: PeerMessage, routing_id: bytes) -> bool:
        """Whether ``message`` belongs to a current registration and came over its connection."""
        return self.is_current(registration_of(message), routing_id)

    def _forget_oldest(self) -> None:
        """The connection that registered last the longest ago, but none that is registered."""
        in_use = {(decode, current.routing_id) for decode, current in self._current.items()}
        oldest = next((place for place in self._newest if place not in in_use), None)
        if oldest is not None:
            del self._newest[oldest]
