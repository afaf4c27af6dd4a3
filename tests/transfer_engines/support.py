"""A peer process that can be killed and frozen, a collector of send results, and small helpers of these tests."""

from __future__ import annotations

import mmap
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from server.prefill.kv_sender import Piece, SendJob, SendResult
from server.transfer.engines.base import PieceStatus, Ticket, TransferEngine

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


class PeerProcess:
    """A receiver in its own process; ``memory`` is its registered region, which lies at ``address`` over there."""

    def __init__(self, path: Path, nbytes: int, session: str = "") -> None:
        with path.open("w+b") as file:
            file.truncate(nbytes)
            self.memory: Bytes = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer_process.py")), str(path), *filter(None, [session])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().split()
        assert len(answer) == 2, "the peer process did not start"
        self.session, self.address = answer[0], int(answer[1])

    def freeze(self) -> None:
        """Stop the process; when this returns, all of its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
            time.sleep(1e-3)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        with self.process:  # closes its pipes
            self.process.kill()


class Results:
    """Collects send results; every ``next`` has a deadline."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[SendResult] = queue.SimpleQueue()

    def __call__(self, result: SendResult) -> None:
        self._queue.put(result)

    def next(self, timeout_s: float = 20.0) -> SendResult:
        return self._queue.get(timeout=timeout_s)

    def none_for(self, seconds: float) -> bool:
        try:
            self._queue.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    """Random and never 0, so that a byte that was not written shows."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


def wait_until_ended(engine: TransferEngine, ticket: Ticket, timeout_s: float = 20.0) -> PieceStatus:
    deadline = time.monotonic() + timeout_s
    while (status := engine.poll(ticket)) is PieceStatus.RUNNING:
        if time.monotonic() > deadline:
            raise TimeoutError(f"piece {ticket} still runs after {timeout_s} s")
        time.sleep(2e-4)
    return status


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits for what another thread is about to do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not so after {timeout_s} s")
        time.sleep(1e-3)


def make_job(pieces: list[Piece], *, key: str = "room", batch_id: int = 0, timeout_s: float = 20.0) -> SendJob:
    return SendJob(key, batch_id, tuple(pieces), time.monotonic() + timeout_s)
