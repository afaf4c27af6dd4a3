"""Prefill and decode nodes as real processes on free loopback ports: started, watched, frozen, killed and restarted."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.transfer.addresses import family_of, join_address

ROOT = Path(__file__).parents[2]
START_S = 90.0
"""For an interpreter to import torch and load the model on a busy machine; about 4 s on a quiet one."""
END_S = 20.0


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody listens on. Restarts on it work, which port 0 would not allow."""
    with socket.socket(family_of(host)) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Waits for ``condition``; returns the seconds it took. An unreachable node counts as not yet."""
    started = time.monotonic()
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return time.monotonic() - started
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


class NodeProcess:
    """One node. ``options`` are its command line; a restart has the same ports. The log of all its lives is ``log``."""

    def __init__(self, role: str, log: Path, *options: str, host: str = "127.0.0.1") -> None:
        self.role, self.log, self.options = role, log, ("--host", host, *options)
        self.port = free_port(host)
        self.url = f"http://{join_address(host, self.port)}"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(base_url=self.url, timeout=10.0)

    def start(self, *more: str) -> None:
        """Starts the process, without waiting for it."""
        command = [sys.executable, "-m", f"server.{self.role}", "--port", str(self.port), *self.options, *more]
        with self.log.open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_for(self, path: str, timeout_s: float = START_S) -> None:
        """Waits until ``path`` answers 200. Raises what the log says last if the process ends or the time is over."""

        def answers() -> bool:
            if not self.running:
                raise RuntimeError(f"{self.role} ended with {self._child.returncode}:\n{self.log_tail()}")
            return self.http.get(path).status_code == httpx.codes.OK

        try:
            until(answers, timeout_s, f"{path} of the {self.role} node")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log_tail()}") from None

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def freeze(self) -> None:
        """Stops the process; when this returns all of its threads stand still."""
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._child.pid}/task")
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
            time.sleep(1e-3)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and the dead process is gone when this returns."""
        self._child.kill()
        self._child.wait()

    def wait_ended(self, timeout_s: float = END_S) -> int:
        """The exit code."""
        return self._child.wait(timeout_s)

    def close(self) -> None:
        """Ends the process whatever state it is in."""
        self.http.close()
        if self.process is None or not self.running:
            return
        self.thaw()
        for timeout_s in (1.0, END_S):  # the second signal cuts short what is under way
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)
                return
        self.kill()

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.http.get("/server_info").json()
        return info

    def counts(self, kind: str) -> dict[str, int]:
        """Slots or pages by state, as ``/server_info`` tells them."""
        counts: dict[str, int] = self.info()["allocator"][kind]
        return counts

    def all_free(self) -> bool:
        """Whether every slot and page is free (from ``/metrics``)."""
        metrics = self.metrics()
        busy = ("reserved", "committed", "quarantined")
        return all(metrics[f"pd_{kind}{{state={state}}}"] == 0 for kind in ("slots", "pages") for state in busy)

    def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics``, by ``name{label=value,...}`` with labels in order of their names."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {sample.name + _labels(sample.labels): sample.value for family in families for sample in family.samples}

    def log_tail(self, n_lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-n_lines:])

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError(f"the {self.role} node was never started")
        return self.process


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}={value}" for name, value in sorted(labels.items())) + "}" if labels else ""


_numbers = itertools.count(1)


def prefill_process(directory: Path, *options: str, host: str = "127.0.0.1") -> tuple[NodeProcess, str]:
    """A prefill node that is not started yet, and the address that decode nodes take."""
    port = free_port(host)
    log = directory / f"prefill-{next(_numbers)}.log"
    node = NodeProcess("prefill", log, "--bootstrap-port", str(port), *options, host=host)
    return node, join_address(host, port)


def decode_process(directory: Path, *options: str, host: str = "127.0.0.1") -> NodeProcess:
    """A decode node that is not started yet; ``options`` say where its prefill nodes are."""
    return NodeProcess("decode", directory / f"decode-{next(_numbers)}.log", *options, host=host)


class ProcessPair:
    """A prefill node ``p``, which decode nodes know as ``address``, and a decode node ``d`` of it."""

    def __init__(
        self,
        directory: Path,
        p_options: tuple[str, ...] = (),
        d_options: tuple[str, ...] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.p, self.address = prefill_process(directory, *p_options, host=host)
        self.d = decode_process(directory, "--prefill", self.address, *d_options, host=host)

    def heal(self) -> None:
        """Starts what does not run, and waits until the pair serves and holds nothing."""
        for node in (self.p, self.d):
            if not node.running:
                node.start()
        self.p.wait_for("/health")
        self.d.wait_for("/ready")
        self.wait_all_free()

    def wait_all_free(self, timeout_s: float = 20.0) -> None:
        until(lambda: self.p.all_free() and self.d.all_free(), timeout_s, "every slot and page of both nodes free")

    def close(self) -> None:
        for node in (self.d, self.p):
            node.close()


@contextlib.contextmanager
def process_pair(
    directory: Path, p_options: tuple[str, ...] = (), d_options: tuple[str, ...] = (), host: str = "127.0.0.1"
) -> Iterator[ProcessPair]:
    """A pair that serves; it is ended, by pid, on every way out."""
    pair = ProcessPair(directory, p_options, d_options, host)
    try:
        pair.heal()
        yield pair
    finally:
        pair.close()
