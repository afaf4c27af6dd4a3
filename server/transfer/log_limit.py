"""Log lines that strangers can cause, as many as they like: one of a kind a second, and how many were held back."""

from __future__ import annotations

import logging
import time

_INTERVAL_S = 1.0
_KINDS_AT_MOST = 256


class LogLimit:
    """Logs a line of each ``kind`` at most once a second."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warning(self, kind: str, line: str) -> None:
        now = time.monotonic()
        if now - self._last.get(kind, float("-inf")) < _INTERVAL_S:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return
        if len(self._last) >= _KINDS_AT_MOST:
            self._last.clear()
            self._held_back.clear()
        self._last[kind] = now
        n_held_back = self._held_back.pop(kind, 0)
        self._log.warning("%s%s", line, f" (and {n_held_back} like it before)" if n_held_back else "")
