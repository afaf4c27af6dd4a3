"""The real routers, in processes of their own, in front of prefill and decode nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from cluster import HOST, Node, free_ports, until
from cluster.node import PLAIN_HTTP

START_S = 60.0
STOP_S = 10.0


@dataclass(frozen=True)
class Kind:
    """One of the routers that there are."""

    package: str
    module: str

    @property
    def missing(self) -> str:
        """Why it cannot be started here; empty if it can."""
        is_there = find_spec(self.module.partition(".")[0]) is not None
        return "" if is_there else f"{self.package} is not installed: scripts/setup --extras cpu,dev,routers"


KINDS = {
    "sglang-router": Kind("sglang-router", "sglang_router.launch_router"),
    "smg": Kind("smg", "smg.launch_router"),
}


class Router:
    """A router process. ``workers`` are the nodes that it knows from the start, by their roles.

    It takes them in turn, looks after their health every second, and tries one that has failed again after two.
    """

    def __init__(self, kind: Kind, log: Path, workers: Sequence[Node], *options: str) -> None:
        self.kind, self.log = kind, log
        port, metrics_port = free_ports(2)
        self.url = f"http://{HOST}:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, **PLAIN_HTTP)
        self.command = [sys.executable, "-m", kind.module, "--pd-disaggregation"]
        for node in workers:
            self.command += [f"--{node.role}", node.url]
            if node.role == "prefill":
                self.command.append(node.address.rpartition(":")[2])
        self.command += ["--host", HOST, "--port", str(port)]
        self.command += ["--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
        self.command += [
            "--policy",
            "round_robin",
            "--health-check-interval-secs",
            "1",
            "--cb-timeout-duration-secs",
            "2",
        ]
        self.command += options
        self._process: subprocess.Popen[bytes] | None = None
        self._n_workers = len(workers)

    @contextlib.contextmanager
    def running(self, *, n_workers: int | None = None, **environment: str) -> Iterator[Router]:
        """The router, when it knows ``n_workers`` (those that it was given); ended on every way out."""
        n_wanted = self._n_workers if n_workers is None else n_workers
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "NO_COLOR": "1", **environment}
            )
        try:
            until(lambda: len(self.healthy()) == n_wanted, START_S, f"the router knows all workers: {self.log}")
            yield self
        finally:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self.http.close()

    def workers(self) -> list[dict[str, Any]]:
        """What it says of each worker."""
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"the router has ended: {self.log.read_text(errors='replace')[-2000:]}")
        found: list[dict[str, Any]] = self.http.get("/workers").json()["workers"]
        return found

    def healthy(self) -> set[str]:
        """URLs of the workers that it sends requests to."""
        return {worker["url"] for worker in self.workers() if worker["is_healthy"]}

    def add(self, node: Node) -> None:
        """Makes ``node`` known, and waits until it counts as healthy."""
        worker: dict[str, Any] = {"url": node.url, "worker_type": node.role}
        if node.role == "prefill":
            worker["bootstrap_port"] = int(node.address.rpartition(":")[2])
        self.http.post("/workers", json=worker).raise_for_status()
        until(lambda: node.url in self.healthy(), START_S, f"the router knows {node.url}: {self.log}")

    def remove(self, node: Node) -> None:
        """Makes ``node`` unknown."""
        [worker] = [worker for worker in self.workers() if worker["url"] == node.url]
        self.http.delete(f"/workers/{worker['id']}").raise_for_status()
        gone = lambda: node.url not in {worker["url"] for worker in self.workers()}  # noqa: E731
        until(gone, START_S, f"the router has forgotten {node.url}: {self.log}")
