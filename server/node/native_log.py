"""What native code (Mooncake's glog, a C++ library) writes to standard error, as lines of the log.

Native code knows nothing of Python's logging and writes to descriptor 2, with whatever lock it holds. So descriptor 2
becomes a pipe that never blocks its writer, and a thread makes log lines of what comes out of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator

_PIPE_NBYTES = 1 << 20
_READ_NBYTES = 64 << 10
_MAX_LINE_NBYTES = 8 << 10
_END_S = 0.5
_GLOG = re.compile(r"^([IWEF])\d{4} [\d:.]+ +\d+ ([\w.+-]+:\d+)\] ?(.*)$")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.WARNING, "F": logging.CRITICAL}
"""Mooncake's errors are failed transfers: the node handles each, and logs what it means for a request."""
_HARMLESS = ("Local segment descriptor not found", "Logging before InitGoogleLogging() is written to STDERR")
"""Mooncake logs these at every start."""

_mooncake, _other = logging.getLogger("mooncake"), logging.getLogger("native")


@contextlib.contextmanager
def native_log() -> Iterator[None]:
    """While inside, lines on descriptor 2 are logged; afterwards the descriptor is as it was."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # more room is better, not needed
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
    os.set_blocking(writing, False)
    before = os.dup(2)
    os.dup2(writing, 2)
    os.close(writing)
    reader = threading.Thread(target=_log_lines, args=(reading,), name="native log", daemon=True)
    reader.start()
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        reader.join(_END_S)  # a child process may hold the pipe open


def _log_lines(reading: int) -> None:
    rest = b""
    with contextlib.closing(os.fdopen(reading, "rb", buffering=0)) as pipe:
        while block := pipe.read(_READ_NBYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                log_line(line)
            if len(rest) > _MAX_LINE_NBYTES:
                log_line(rest)
                rest = b""
    log_line(rest)


def log_line(line: bytes) -> None:
    """Logs one line of native code, in its own severity where it has one."""
    text = line[:_MAX_LINE_NBYTES].decode("utf-8", "backslashreplace").strip()
    if not text:
        return
    source, level, words = _other, logging.WARNING, text
    if match := _GLOG.match(text):
        source, level, words = _mooncake, _LEVELS[match[1]], f"{match[2]}: {match[3]}"
    if any(harmless in text for harmless in _HARMLESS):
        level = logging.DEBUG
    source.log(level, "%s", words)
