"""The log of a process: one format, and nobody waits for whoever reads it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from server.node.logs import LogWriter
from server.node.native_log import log_line

pytestmark = pytest.mark.processes

ENDS_S = 60.0
"""A process that waits for nothing has ended, on the busiest machine."""
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+: .+")


class Pipe:
    """A pipe that is read only when the test wants to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 4096)

    def read_all(self) -> str:
        os.close(self.writing)
        self.writing = -1
        with os.fdopen(self.reading, "rb") as pipe:
            self.reading = -1
            return pipe.read().decode()

    def close(self) -> None:
        for fd in (self.reading, self.writing):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def run(body: str, level: str = "info") -> subprocess.Popen[bytes]:
    """A process with nothing but the log, that runs ``body``. Its standard error is a pipe."""
    code = (
        "import ctypes, logging, os, sys, threading, time, warnings\n"
        "from server.node.logs import process_log, open_standard_streams\n"
        "log = logging.getLogger('test')\n"
        f"with process_log({level!r}) as writer:\n" + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_log_that_nobody_reads_loses_lines_and_says_how_many(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writing, max_nbytes=50_000)
    writer.start()
    for number in range(10_000):
        writer.put(f"line {number:06}")
    assert not writer.close(timeout_s=0.1), "nobody has read yet"
    n_lost = writer.n_dropped
    assert n_lost > 0
    os.set_blocking(pipe.reading, False)
    seen = b""
    while not writer.close(timeout_s=0.001):
        with contextlib.suppress(BlockingIOError):
            seen += os.read(pipe.reading, 1 << 20)
    os.set_blocking(pipe.reading, True)
    lines = (seen.decode() + pipe.read_all()).splitlines()
    plain = [line for line in lines if line.startswith("line ")]
    assert plain == [f"line {number:06}" for number in range(10_000 - n_lost)], "in order, the first ones"
    (lost,) = [line for line in lines if "lines were lost" in line]
    assert LINE.fullmatch(lost)
    assert f": {n_lost} log lines were lost" in lost


def test_a_closed_log_harms_nobody(pipe: Pipe) -> None:
    os.close(pipe.reading)
    pipe.reading = -1
    writer = LogWriter(pipe.writing)
    writer.start()
    writer.put("nobody will read this")
    assert writer.close(ENDS_S)


def test_python_and_native_code_go_on_while_nobody_reads_the_log() -> None:
    process = run(
        """
        libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, as Mooncake does in places
        for number in range(3000):
            log.info("%s", "p" * 4000)
            print("q" * 1000, file=sys.stderr)
            libc.write(2, b"n" * 1000 + b"\\n", 1001)
        print(writer.n_dropped, flush=True)
        """
    )
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        assert process.wait(ENDS_S) == 0, "its end waits for the reader only for a short time"
    finally:
        process.kill()
        process.communicate()


def test_whatever_is_said_has_one_format() -> None:
    process = run(
        """
        log.info("by logging")
        warnings.warn("by warnings")
        print("by print", file=sys.stderr)
        os.write(2, b"by native code\\n")
        os.write(2, b"E1130 08:47:27.835480  7585 transfer_task.cpp:98] by glog\\n")
        os.write(2, b"E1130 08:47:27.835480  7585 transfer_metadata.cpp:1098] Local segment descriptor not found\\n")
        os.write(2, b"WARNING: Logging before InitGoogleLogging() is written to STDERR\\n")
        log.info("broken %d", "call")
        def die():
            raise RuntimeError("by a thread")
        thread = threading.Thread(target=die, name="poor thing")
        thread.start()
        thread.join()
        """
    )
    _, said = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0
    lines = said.decode().splitlines()
    for words in ("by logging", "by warnings", "by print", "by native code", "mooncake: transfer_task.cpp:98: by glog"):
        assert any(LINE.fullmatch(line) and words in line for line in lines), words
    assert "Local segment" not in said.decode()
    assert "InitGoogleLogging" not in said.decode()
    (thread,) = [line for line in lines if "poor thing" in line]
    assert LINE.fullmatch(thread)
    assert "RuntimeError: by a thread" in lines, "the traceback follows its line"
    assert "could not be formatted" in said.decode()


def test_a_crash_still_says_where() -> None:
    process = run(
        """
        log.info("before the crash")
        while writer.n_waiting:
            time.sleep(0.01)
        os.abort()
        """
    )
    _, said = process.communicate(timeout=ENDS_S)
    assert process.returncode == -6
    text = said.decode()
    assert "before the crash" in text
    assert "Fatal Python error: Aborted" in text
    assert 'File "<string>"' in text


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        (b"W1130 08:47:27.1  75 a.cpp:9] slow", "WARNING", "a.cpp:9: slow"),
        (b"E1130 08:47:27.1  75 a.cpp:9] failed", "WARNING", "a.cpp:9: failed"),
        (b"F1130 08:47:27.1  75 a.cpp:9] Check failed", "CRITICAL", "a.cpp:9: Check failed"),
        (b"\xff something else", "WARNING", "\\xff something else"),
    ],
)
def test_native_lines_keep_their_severity(
    caplog: pytest.LogCaptureFixture, line: bytes, level: str, words: str
) -> None:
    """Except for Mooncake's errors: they are failed transfers, which the node handles."""
    log_line(line)
    assert [(record.levelname, record.message) for record in caplog.records] == [(level, words)]


def test_missing_standard_streams_are_filled_with_nothing() -> None:
    code = """
        import os
        for fd in (0, 1, 2):
            os.close(fd)
        from server.node.logs import open_standard_streams
        open_standard_streams()
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
        os._exit(0 if names == ["/dev/null"] * 3 else 1)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0
