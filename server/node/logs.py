"""The log of a process: every line in one format, through one bounded queue, written by one thread.

Whoever logs only puts a line into the queue. If nobody reads the log (a full pipe, a stopped terminal), lines are lost
and counted, and the log says how many as soon as it can; the event loop and the engine never wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType

from server.node.native_log import native_log

log = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_QUEUED_NBYTES = 4 << 20
MAX_LINE_CHARS = 32 << 10
"""A traceback of any sense is shorter; more of one line is cut off."""
FLUSH_S = 2.0
"""How long the end of a process waits for its last lines to be written."""
_BLOCK_NBYTES = 64 << 10
_CLEAR_LINE = b"\r\x1b[K"

LIBRARY_LEVELS = {"httpx": logging.WARNING, "transformers": logging.WARNING, "uvicorn.error": logging.WARNING}
"""Libraries that log at ``info`` what only their developers need."""


class LogWriter:
    """Writes lines to ``fd`` from a thread of its own. At most ``max_nbytes`` wait; what is over that is dropped."""

    def __init__(self, fd: int, max_nbytes: int = MAX_QUEUED_NBYTES) -> None:
        self.n_dropped = 0
        """Since the start."""
        self._fd = fd
        self._max_nbytes = max_nbytes
        self._lines: deque[bytes] = deque()
        self._nbytes = 0
        self._n_unreported = 0
        self._changed = threading.Condition()
        self._closing = False
        self._has_status = False
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Bytes that are not written yet."""
        return self._nbytes

    def put(self, line: str) -> None:
        """Queues one line (without its line end). Never waits for the reader of the log."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._has_status:
                data, self._has_status = _CLEAR_LINE + data, False
            if self._nbytes + len(data) > self._max_nbytes:
                self.n_dropped += 1
                self._n_unreported += 1
                return
            self._lines.append(data)
            self._nbytes += len(data)
            self._changed.notify()

    @property
    def is_terminal(self) -> bool:
        """Whether somebody can watch a line change."""
        return os.isatty(self._fd) and os.environ.get("TERM") != "dumb"

    @property
    def n_columns(self) -> int:
        return os.get_terminal_size(self._fd).columns or 80  # 0: it does not say

    def put_status(self, text: str) -> None:
        """On a terminal: shows ``text`` below the log until the next line or status; an empty one takes it away."""
        data = _CLEAR_LINE + text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._nbytes + len(data) > self._max_nbytes:
                return
            self._lines.append(data)
            self._nbytes += len(data)
            self._has_status = bool(text)
            self._changed.notify()

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Ends the thread when everything is written, but at the latest after ``timeout_s``; whether it was."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                block = self._take_block()
            _write(self._fd, block)
            with self._changed:
                self._nbytes -= len(block)
                n_lost, self._n_unreported = self._n_unreported, 0
            if n_lost:
                _write(self._fd, _lost_line(n_lost))

    def _take_block(self) -> bytes:
        """The oldest lines. They count as queued until they are written."""
        lines, nbytes = [], 0
        while self._lines and nbytes < _BLOCK_NBYTES:
            lines.append(self._lines.popleft())
            nbytes += len(lines[-1])
        return b"".join(lines)


def _write(fd: int, data: bytes) -> None:
    """Writes all of ``data``, however long that takes.

    A log that is gone (a closed pipe, a terminal that hung up) is no reason to end: its lines are lost.
    """
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            time.sleep(0.01)  # whoever gave us the descriptor made it non-blocking
        except OSError:
            return


def _lost_line(n: int) -> bytes:
    text = f"{n} log lines were lost: the log was not read fast enough"
    record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)
    return logging.Formatter(FORMAT).format(record).encode() + b"\n"


class QueueingHandler(logging.Handler):
    """Formats records in the thread that logs, and hands them to ``writer``."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.writer = writer
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  (a broken log call must harm nobody, and must be seen)
            line = f"a line of {record.name} could not be formatted ({error!r}): {record.msg!r}"
        if len(line) > MAX_LINE_CHARS:
            line = f"{line[:MAX_LINE_CHARS]}... ({len(line)} characters)"
        self.writer.put(line)


def log_terminal() -> LogWriter | None:
    """The writer of this process's log, if that is a terminal."""
    writers = [handler.writer for handler in logging.getLogger().handlers if isinstance(handler, QueueingHandler)]
    return next((writer for writer in writers if writer.is_terminal), None)


class _StderrLines(io.TextIOBase):
    """Stands for ``sys.stderr``: whole lines that some library prints become lines of the log."""

    def __init__(self) -> None:
        self._log = logging.getLogger("stderr")
        self._rest = ""

    def write(self, text: str, /) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._log.warning("%s", line)
        self._rest = self._rest[-MAX_LINE_CHARS:]
        return len(text)

    def fileno(self) -> int:
        return 2


@contextlib.contextmanager
def process_log(level: str) -> Iterator[LogWriter]:
    """Everything that this process logs or prints, in Python or natively, goes through one :class:`LogWriter` to
    standard error, from ``level`` (``debug`` .. ``error``) on. At the end, in at most some seconds, all of it is
    written.

    What :mod:`faulthandler` writes at a crash goes to standard error directly. Native lines of the last moment before
    it may be lost.
    """
    real_fd = os.dup(2)
    writer = LogWriter(real_fd)
    writer.start()
    crash_fd = _crash_descriptor(real_fd)
    had_faulthandler = faulthandler.is_enabled()
    faulthandler.enable(file=crash_fd)
    try:
        with _logging_to(QueueingHandler(writer), level), native_log():
            yield writer
    finally:
        faulthandler.disable()
        if had_faulthandler:
            faulthandler.enable(file=sys.__stderr__ or 2)
        if writer.close():
            os.close(real_fd)  # a thread that still writes keeps it to the end of the process
        os.close(crash_fd)


@contextlib.contextmanager
def _logging_to(handler: logging.Handler, level: str) -> Iterator[None]:
    root, stderr, hooks = logging.getLogger(), sys.stderr, (threading.excepthook, sys.unraisablehook)
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(handler)
    is_debug = level == "debug"
    for name, least in LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(logging.NOTSET if is_debug else least)
    logging.captureWarnings(True)
    threading.excepthook, sys.unraisablehook = _on_dead_thread, _on_unraisable
    sys.stderr = _StderrLines()
    try:
        yield
    finally:
        sys.stderr = stderr
        threading.excepthook, sys.unraisablehook = hooks
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(before)


def _on_dead_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        name = args.thread.name if args.thread is not None else "?"
        log.error("the thread %r ended by an exception", name, exc_info=_exc_info(args.exc_value))


def _on_unraisable(args: sys.UnraisableHookArgs) -> None:
    if args.exc_value is not None:
        log.error("%s: %r", args.err_msg or "ignored an exception in", args.object, exc_info=_exc_info(args.exc_value))


def _exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    return type(error), error, error.__traceback__


def _crash_descriptor(fd: int) -> int:
    """Where a crash is reported: ``fd``, or, of a pipe, a way into it that never holds up a dying process."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    return os.dup(fd)


def open_standard_streams() -> None:
    """Puts ``/dev/null`` in place of standard streams that the process was started without.

    Otherwise the next sockets get the numbers 0 to 2: libuv ends the process when it closes one of those, and
    everything that is printed goes to a peer.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            while (opened := os.open(os.devnull, os.O_RDWR)) < fd:
                pass  # the lowest free number comes first
            if opened > fd:
                os.dup2(opened, fd)
                os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
