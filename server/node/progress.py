"""How far a long reading of files has come: a bar where the log is a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from server.node.logs import LogWriter, log_terminal
from server.sizes import size

log = logging.getLogger(__name__)

BAR_S = 0.2
LINE_S = 5.0

OnProgress = Callable[[int, int], None]
"""Is told how many bytes have been read, and of how many."""


class _Shown(Protocol):
    def show(self, done: int, total: int, took_s: float) -> None: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def reading_progress(
    what: str, terminal: LogWriter | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnProgress]:
    """Yields what is to be told the bytes of ``what`` (``weights``) as they are read. At the end one line says how many
    there were, and how fast they came. ``terminal`` is the log's own where there is one.
    """
    terminal = terminal or log_terminal()
    shown: _Shown = _Lines(what) if terminal is None else _Bar(what, terminal)
    every_s = LINE_S if terminal is None else BAR_S
    began = last = clock()
    done_now = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal last, done_now
        now, done_now = clock(), done
        if now - last >= every_s:
            last = now
            shown.show(done, total, now - began)

    try:
        yield on_progress
    finally:
        shown.close()
    if done_now:
        took_s = clock() - began
        log.info("%s: %s read in %.1f s (%s)", what, size(done_now), took_s, rate(done_now, took_s))


class _Lines:
    def __init__(self, what: str) -> None:
        self._what = what

    def show(self, done: int, total: int, took_s: float) -> None:
        share = 100 * done // max(1, total)
        log.info("%s: %s of %s read (%d %%), %s", self._what, size(done), size(total), share, rate(done, took_s))

    def close(self) -> None:
        pass


class _Bar:
    """Drawn by tqdm, written by the log's writer, so that lines of the log and the bar do not mix."""

    def __init__(self, what: str, terminal: LogWriter) -> None:
        from tqdm import tqdm  # only where somebody looks: it takes a tenth of a second

        self._draw, self._what, self._terminal = tqdm.format_meter, what, terminal

    def show(self, done: int, total: int, took_s: float) -> None:
        columns = self._terminal.n_columns - 1
        bar = self._draw(done, total, took_s, ncols=columns, prefix=self._what, unit="B", unit_scale=True)
        self._terminal.put_status(bar)

    def close(self) -> None:
        self._terminal.put_status("")


def rate(nbytes: int, took_s: float) -> str:
    """``512 MiB/s``."""
    return f"{nbytes / 2**20 / max(took_s, 1e-9):.0f} MiB/s"
