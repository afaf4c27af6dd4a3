"""Child processes that live and end together: logs in files, deaths named, an orderly end whatever happens."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

STOP_TIMEOUT_S = 15.0
POLL_S = 0.2
LOG_TAIL_LINES = 15


class PairFailed(Exception):
    """The pair cannot serve. The message says which part and why."""


class StopRequested(BaseException):
    """A stop signal came. Raised in the main thread; no ``Exception``, so that nothing takes it for an error."""


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into :class:`StopRequested`; inside :meth:`deferred` it waits."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._received: int | None = None
        self._deferring = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A block that a signal must not cut in two; the signal is raised at its end."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._received is not None:
            raise StopRequested(signal.Signals(self._received).name)

    def ignore(self) -> None:
        """From now on the end is under way and cannot be asked for again."""
        for number in self._SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._received is not None:
            return  # the end is under way
        self._received = number
        if not self._deferring:
            raise StopRequested(signal.Signals(number).name)


@dataclass
class Process:
    """One child: its command, and the file that takes its output (emptied at the start)."""

    name: str
    command: Sequence[str]
    log: Path
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts the child in a session of its own: a Ctrl-C in the terminal reaches it through :class:`Pair` only."""
        with self.log.open("wb") as log:
            try:
                self._child = subprocess.Popen(
                    self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise PairFailed(f"{self.name} cannot be started: {self.command[0]}: {error.strerror}") from error

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def exit_code(self) -> int | None:
        """None while the child runs; minus the signal's number if one ended it."""
        return self._child.poll() if self._child is not None else None

    def send_signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def check(self) -> None:
        """Raises :class:`PairFailed` with the end of the log if the child has ended."""
        if self._child is None or self._child.poll() is None:
            return
        code = self._child.returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise PairFailed("\n  ".join([f"{self.name} ended by itself ({how}); the end of {self.log}:", *lines]))

    def terminate(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def wait_or_kill(self, timeout_s: float) -> bool:
        """Waits for the child's end; kills it after ``timeout_s``. False if it had to be killed."""
        if self._child is None:
            return True
        try:
            self._child.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return False
        return True


class Pair:
    """Processes started in order, checked together, and ended together in the opposite order."""

    def __init__(self, processes: Sequence[Process], signals: StopSignals) -> None:
        self.processes = processes
        self._signals = signals

    def start(self) -> None:
        """Starts all. A stop signal meanwhile is raised once every child is known, so that none is left behind."""
        with self._signals.deferred():
            for process in self.processes:
                process.start()

    def check(self) -> None:
        """Raises :class:`PairFailed` for the first process that has ended."""
        for process in self.processes:
            process.check()

    def check_within(self, timeout_s: float) -> None:
        """As :meth:`check`, over ``timeout_s``: a broken connection is seen a little before the death behind it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            time.sleep(POLL_S / 4)

    def wait(self) -> None:
        """Returns never: raises :class:`PairFailed` when one ends, or the signal that asks for the end."""
        while True:
            self.check()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Asks every process to end, the last one first, and kills what has not ended after the deadline."""
        self._signals.ignore()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            if not process.wait_or_kill(deadline - time.monotonic()):
                print(f"{process.name} did not end within {STOP_TIMEOUT_S:g} s and was killed; see {process.log}")


def require_free_port(host: str, port: int, purpose: str) -> None:
    """Raises :class:`PairFailed` if nothing can listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PairFailed(
                f"{purpose} port {host}:{port} cannot be used ({error.strerror}); "
                f"stop what uses it or choose another with --{purpose}-port"
            ) from error


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were all free at once a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]
