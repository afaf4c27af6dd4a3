"""Memory that a prefill node may still write to: whose it was, since when, and why it is not free yet."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from server.failure import Failure
from server.transfer.rooms import RoomKey

log = logging.getLogger(__name__)

LONG_S = 30.0
"""A room in quarantine for longer is warned of, and again after as long."""


@dataclass
class _Entry:
    since: float
    failure: Failure
    prefill: str
    warned: float


class Quarantine:
    """The rooms whose slot and pages are neither in use nor free. Every ``now`` is on one monotonic clock, in seconds.

    It only keeps the record: what ends a quarantine is ``Quiesced`` or a fence, never the time.
    """

    def __init__(self) -> None:
        self._entries: dict[RoomKey, _Entry] = {}

    def enter(self, key: RoomKey, failure: Failure, prefill: str, now: float) -> None:
        """The room ended with ``failure`` before it was committed; ``prefill`` is the address of its prefill node."""
        self._entries[key] = _Entry(now, failure, prefill, now)

    def leave(self, key: RoomKey) -> None:
        """The room's memory is free. Other rooms than those in quarantine may leave too."""
        self._entries.pop(key, None)

    def oldest_s(self, now: float) -> float:
        """How long the oldest one has lasted; 0 if there is none."""
        return max((now - entry.since for entry in self._entries.values()), default=0.0)

    def warn(self, now: float) -> None:
        """Logs each one that has lasted for another :data:`LONG_S`."""
        for key, entry in self._entries.items():
            if now - entry.warned >= LONG_S:
                entry.warned = now
                log.warning(
                    "%s is in quarantine for %.0f s: prefill %s has not said that its writes ended (failed: %s)",
                    key,
                    now - entry.since,
                    entry.prefill,
                    entry.failure.reason,
                )

    def describe(self, now: float) -> list[dict[str, Any]]:
        """The rooms as ``/server_info`` shows them, the oldest first."""
        return [
            {
                "room": str(key.room),
                "epoch": key.epoch,
                "prefill": entry.prefill,
                "seconds": round(now - entry.since, 3),
                "code": entry.failure.code,
                "reason": entry.failure.reason,
            }
            for key, entry in sorted(self._entries.items(), key=lambda item: item[1].since)
        ]
