"""SIGINT, SIGTERM and SIGHUP as an exception in the main thread, which no start of a process is cut in two by."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar


class StopRequested(BaseException):
    """A stop signal came. Raised in the main thread; no ``Exception``, so that nothing takes it for an error."""


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into :class:`StopRequested` while its block lasts."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    _active: ClassVar[StopSignals | None] = None

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferring = False
        self.ignoring = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._SIGNALS}
        StopSignals._active = self
        return self

    def __exit__(self, *_: object) -> None:
        StopSignals._active = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @classmethod
    @contextmanager
    def deferred(cls) -> Iterator[None]:
        """A block that a signal must not cut in two; the signal is raised at its end."""
        if (active := cls._active) is None:
            yield
            return
        active.deferring = True
        try:
            yield
        finally:
            active.deferring = False
        if active.received is not None:
            raise StopRequested(signal.Signals(active.received).name)

    @classmethod
    def ignore(cls) -> None:
        """From now on the end is under way and cannot be asked for again."""
        if cls._active is not None:
            cls._active.ignoring = True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.ignoring or self.received is not None:
            return
        self.received = number
        if not self.deferring:
            raise StopRequested(signal.Signals(number).name)
