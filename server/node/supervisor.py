"""Whether everything that a node cannot live without is still running."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

Vital = asyncio.Task[None] | threading.Thread


class Supervisor:
    """Looks at tasks and threads whenever it is asked (so nothing of its own can die), and remembers the first death.

    A task that was cancelled ended as it should; everything else that has ended is dead.
    """

    def __init__(self) -> None:
        self._sources: list[Callable[[], Iterable[Vital]]] = []
        self._failure = ""

    def watch(self, vital: Callable[[], Iterable[Vital]]) -> None:
        """Looks from now on at whatever ``vital`` returns."""
        self._sources.append(vital)

    def fail(self, reason: str) -> None:
        """The node is not to go on. The first reason stays."""
        if not self._failure:
            log.critical("%s", reason)
            self._failure = reason

    def end(self) -> None:
        """Stops looking: the node is being stopped."""
        self._sources.clear()

    def look(self) -> str:
        """Why the node is dead; empty while it lives."""
        for vital in [vital for source in self._sources for vital in source()]:
            if reason := _death(vital):
                self.fail(reason)
        return self._failure


def _death(vital: Vital) -> str:
    if isinstance(vital, threading.Thread):
        return "" if vital.is_alive() else f"the thread {vital.name!r} has ended"
    if not vital.done() or vital.cancelled():
        return ""
    return f"the task {vital.get_name()!r} has ended: {vital.exception()!r}"
