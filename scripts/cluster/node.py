"""One prefill or decode server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.ports import HOST, free_port
from cluster.wait import until
from server.transfer.addresses import join_address

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LOGS = ROOT / ".run"
START_S = 120.0
"""For an interpreter to import torch and load the model on a busy machine; about 2 s on a quiet one."""
HTTP_S = 10.0
PLAIN_HTTP: dict[str, Any] = {"trust_env": False, "verify": False}
"""For clients of these nodes: no proxies, and no certificates, which take a tenth of a second to read."""
LOG_TAIL_LINES = 15


class ClusterFailed(Exception):
    """The servers cannot be run. The message says which one and why."""


@dataclass(frozen=True)
class Resources:
    """What the system has given a process."""

    threads: int
    fds: int
    sockets: int
    rss_mib: float

    @staticmethod
    def of(pid: int) -> Resources:
        proc = Path(f"/proc/{pid}")
        fds = [_target(fd) for fd in (proc / "fd").iterdir()]
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return Resources(
            threads=int(status["Threads"]),
            fds=len(fds),
            sockets=sum(fd.startswith("socket:") for fd in fds),
            rss_mib=round(int(status["VmRSS"].split()[0]) / 1024, 1),
        )


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:  # closed since it was listed
        return ""


class Node:
    """A server on ports that stay the same when it is started again. The log of all its lives is ``log``.

    ``options`` are further words of its command line, ``address`` is a prefill node's control address. With ``faulty``
    the node reads its faults from a file, which :meth:`arm` writes.
    """

    def __init__(
        self,
        role: str,
        log: Path,
        *options: str,
        name: str = "",
        host: str = HOST,
        port: int = 0,
        bootstrap_port: int = 0,
        program: Sequence[str] = (),
        faulty: bool = False,
    ) -> None:
        self.role, self.log, self.name = role, log, name or role
        self.port = port or free_port(host)
        self.url = f"http://{join_address(host, self.port)}"
        own = ["--host", host, "--port", str(self.port)]
        self.address = ""
        if role == "prefill":
            self.address = join_address(host, bootstrap_port or free_port(host))
            own += ["--bootstrap-port", self.address.rpartition(":")[2]]
        self._fault_file = log.with_suffix(".faults") if faulty else None
        if self._fault_file is not None:
            own += ["--fault", f"@{self._fault_file}"]
        self.command = [*(program or [str(BIN / f"launch_{role}")]), *own, *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.lives = 0
        unkept = httpx.Limits(max_keepalive_connections=0)  # no socket is left open in the node between two looks
        self.http = httpx.Client(base_url=self.url, timeout=HTTP_S, limits=unkept, **PLAIN_HTTP)

    # --- its process --------------------------------------------------------------------------------------------------

    def start(self, *more: str, wrapper: Sequence[str] = (), output: int | None = None) -> None:
        """Starts the process, with ``more`` options for this life, and returns at once.

        ``wrapper`` is a command that runs it, ``output`` what it writes to instead of the log. It has a session of its
        own: a Ctrl-C in the terminal does not reach it. Raises :class:`ClusterFailed`.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self._fault_file is not None and not self.lives:
            self._fault_file.unlink(missing_ok=True)
        with self.log.open("ab" if self.lives else "wb") as log:
            try:
                self.process = subprocess.Popen(
                    [*wrapper, *self.command, *more],
                    stdin=subprocess.DEVNULL,
                    stdout=log if output is None else output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ClusterFailed(f"{self.name} cannot be started: {self.command[0]}: {error.strerror}") from error
        self.lives += 1

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def check(self) -> None:
        """Raises :class:`ClusterFailed` with the end of the log if the process has ended."""
        if self.process is None or self.process.poll() is None:
            return
        code = self.process.returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        tail = self.log_tail(LOG_TAIL_LINES).replace("\n", "\n  ")
        raise ClusterFailed(f"{self.name} ended by itself ({how}); the end of {self.log}:\n  {tail}")

    def wait_for(
        self, path: str, timeout_s: float = START_S, *, since: float | None = None, beside: Iterable[Node] = ()
    ) -> None:
        """Waits until ``path`` answers with success. Raises :class:`ClusterFailed` if this node, or one ``beside`` it,
        ends meanwhile, or ``timeout_s`` after ``since`` (now, if not given).
        """
        now = time.monotonic()
        reason = "no answer yet"

        def answers() -> bool:
            nonlocal reason
            for node in (self, *beside):
                node.check()
            try:
                response = self.http.get(path)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                raise
            reason = f"HTTP {response.status_code} {response.text[:200]}"
            return response.is_success

        try:
            until(answers, (now if since is None else since) + timeout_s - now, path)
        except TimeoutError:
            raise ClusterFailed(f"{self.url}{path} was not ready after {timeout_s:g} s: {reason}") from None

    @property
    def ready_path(self) -> str:
        """A decode node is ready when a transfer has arrived, a prefill node when it lives."""
        return "/ready" if self.role == "decode" else "/health"

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def freeze(self) -> None:
        """Stops the process; when this returns all of its threads stand still."""
        self.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
            time.sleep(1e-3)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and the dead process is gone when this returns."""
        self._child.kill()
        self._child.wait()

    def wait_ended(self, timeout_s: float) -> int:
        """The exit code: minus the signal's number if one ended it. Raises :class:`subprocess.TimeoutExpired`."""
        return self._child.wait(max(0.0, timeout_s))

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError(f"the {self.name} node was never started")
        return self.process

    # --- what it says and has -----------------------------------------------------------------------------------------

    def arm(self, *faults: str) -> None:
        """The node's injected faults from now on, none without arguments. It reads them again for every room and
        message, so the file is put in place whole.
        """
        if self._fault_file is None:
            raise RuntimeError(f"the {self.name} node was made without a file of faults")
        self._fault_file.parent.mkdir(parents=True, exist_ok=True)
        new = self._fault_file.with_suffix(".new")
        new.write_text("\n".join(faults), encoding="utf-8")
        os.replace(new, self._fault_file)

    def log_tail(self, n_lines: int = 30) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-n_lines:])

    def resources(self) -> Resources:
        return Resources.of(self.pid)

    def is_ok(self, path: str) -> bool:
        """Whether ``path`` answers with success; not if the node cannot be reached."""
        with contextlib.suppress(httpx.TransportError):
            return self.http.get(path).is_success
        return False

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.http.get("/server_info").raise_for_status().json()
        return info

    def counts(self, kind: str) -> dict[str, int]:
        """Slots or pages by state, as ``/server_info`` says."""
        counts: dict[str, int] = self.info()["allocator"][kind]
        return counts

    def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics``, by ``name{label=value,...}`` with labels in order of their names."""
        return {sample.name + _labels(sample.labels): sample.value for sample in self._samples()}

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """The samples called ``name`` by the values of their labels, in order of the labels' names."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for sample in self._samples()
            if sample.name == name
        }

    def transfer_bytes(self) -> dict[str, int]:
        """Bytes moved so far by component."""
        return {component: int(n) for (component,), n in self.samples("pd_transfer_bytes_total").items()}

    def held(self) -> list[str]:
        """What the node still holds for requests, in words; empty when it is idle."""
        metrics = self.metrics()
        names = ["pd_num_requests_waiting", "pd_num_requests_running", *_MEMORY]
        return [f"{self.name}: {name} is {metrics[name]:g}" for name in names if metrics[name]]

    def all_free(self) -> bool:
        """Whether no request has a slot or page: all are free, or pages of the cache that nobody reads."""
        metrics = self.metrics()
        return not any(metrics[name] for name in _MEMORY)

    def _samples(self) -> Iterator[Sample]:
        text = self.http.get("/metrics").raise_for_status().text
        return (sample for family in text_string_to_metric_families(text) for sample in family.samples)


_IN_USE = ("reserved", "committed", "quarantined")
_MEMORY = [
    *(f"pd_{kind}{{state={state}}}" for kind in ("slots", "pages") for state in _IN_USE),
    "pd_pages{state=shared}",
]


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}={value}" for name, value in sorted(labels.items())) + "}" if labels else ""
