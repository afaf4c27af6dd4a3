"""One write by Mooncake between two processes and nothing else: what a hand-off is compared with.

As a program it is the receiver: registers argv[1] bytes, prints "session address", and lives until its input ends.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from server.transfer.engines.base import PieceStatus
from server.transfer.engines.mooncake import MooncakeEngine

from .measurement import BenchFailed

START_TIMEOUT_S, END_TIMEOUT_S, WRITE_TIMEOUT_S = 60.0, 10.0, 60.0


class RawWriter:
    """A receiver process with ``nbytes`` of memory, and an engine here that writes into it."""

    def __init__(self, nbytes: int) -> None:
        self._receiver = subprocess.Popen(
            [sys.executable, "-m", "benchmark.raw_write", str(nbytes)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._source = np.ones(nbytes, dtype=np.uint8)
        self._engine = MooncakeEngine(transport="tcp")
        self._engine.register(self._source.ctypes.data, self._source.nbytes)
        announced = self._announced()
        if len(announced) != 2:
            self.close()
            raise BenchFailed(f"the receiver of the raw writes did not start within {START_TIMEOUT_S:g} s")
        self._session, self._target = announced[0], int(announced[1])

    @property
    def version(self) -> str:
        return self._engine.version

    def _announced(self) -> list[str]:
        """Its session and address; nothing if they do not come in time."""
        output = self._receiver.stdout
        if output is None or not select.select([output], [], [], START_TIMEOUT_S)[0]:
            return []
        return output.readline().split()

    def write_s(self, nbytes: int) -> float:
        """Seconds from submitting one write of ``nbytes`` until it is known to be applied, polled without a pause."""
        started = time.perf_counter()
        ticket = self._engine.submit(self._session, self._source.ctypes.data, self._target, nbytes)
        while (status := self._engine.poll(ticket)) is PieceStatus.RUNNING:
            if time.perf_counter() - started > WRITE_TIMEOUT_S:
                raise BenchFailed(f"a raw write of {nbytes} bytes did not end within {WRITE_TIMEOUT_S:g} s")
        elapsed_s = time.perf_counter() - started
        if status is not PieceStatus.APPLIED:
            raise BenchFailed(f"a raw write of {nbytes} bytes ended {status}")
        return elapsed_s

    def close(self) -> None:
        self._engine.close()
        try:
            self._receiver.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._receiver.kill()
            self._receiver.communicate()


def receive(nbytes: int) -> None:
    """The receiver's whole life."""
    memory = np.zeros(nbytes, dtype=np.uint8)
    engine = MooncakeEngine(transport="tcp")
    engine.register(memory.ctypes.data, memory.nbytes)
    print(engine.session, memory.ctypes.data, flush=True)
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    receive(int(sys.argv[1]))
