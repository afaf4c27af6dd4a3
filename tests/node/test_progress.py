"""How far a reading is: a bar on a terminal, lines of the log elsewhere, and nothing mixed up."""

from __future__ import annotations

import logging
import os
import pty
import termios

import pytest

from server.node.logs import LogWriter, QueueingHandler, log_terminal
from server.node.progress import reading_progress

GIB = 1 << 30
CLEAR = b"\r\x1b[K"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_every_few_seconds_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO), reading_progress("weights", clock=clock) as on_progress:
        for second in range(1, 13):
            clock.now += 1
            on_progress(second * GIB, 12 * GIB)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 5.0 GiB of 12.0 GiB read (41 %), 1024 MiB/s",
        "weights: 10.0 GiB of 12.0 GiB read (83 %), 1024 MiB/s",
        "weights: 12.0 GiB read in 12.0 s (1024 MiB/s)",
    ]


def test_nothing_that_was_read_is_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), reading_progress("weights"):
        pass
    assert caplog.records == []


def test_a_pipe_is_no_terminal() -> None:
    reading, writing = os.pipe()
    assert not LogWriter(writing).is_terminal
    os.close(reading)
    os.close(writing)


def test_a_terminal_shows_a_bar_that_lines_of_the_log_do_not_run_into() -> None:
    watching, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    writer, clock = LogWriter(terminal), Clock()
    handler = QueueingHandler(writer)
    logging.getLogger().addHandler(handler)
    writer.start()
    try:
        assert log_terminal() is writer
        with reading_progress("weights", clock=clock) as on_progress:
            clock.now += 1
            on_progress(GIB, 4 * GIB)
            logging.getLogger("elsewhere").warning("a line")
            clock.now += 1
            on_progress(2 * GIB, 4 * GIB)
            on_progress(3 * GIB, 4 * GIB)  # too soon for another bar
    finally:
        logging.getLogger().removeHandler(handler)
        assert writer.close()
    shown = os.read(watching, 1 << 16)
    os.close(watching)
    os.close(terminal)
    _, first, line, second, end = shown.split(CLEAR)
    assert first.startswith(b"weights:  25%|")
    assert b"1.07G/4.29G [00:01<00:03, 1.07GB/s]" in first
    assert line.endswith(b"WARNING elsewhere: a line\r\n")
    assert second.startswith(b"weights:  50%|")
    assert end == b""
