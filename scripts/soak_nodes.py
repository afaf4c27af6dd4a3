"""The processes of a soak run: started, killed, frozen and started again on their ports, and what each holds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from control_relay import ControlRelay, control_relay
from process_pair import Process, free_ports
from prometheus_client.parser import text_string_to_metric_families
from quickstart import BIN, HOST

POLL_S = 0.05
STOP_S = 60.0
"""For every process to end in order, at the end of a run."""


class SoakFailed(Exception):
    """The run cannot go on: a node does not start, or does not come back."""


@dataclass(frozen=True)
class Resources:
    """What the system has given a process."""

    threads: int
    fds: int
    sockets: int
    rss_mib: int

    @staticmethod
    def of(pid: int) -> Resources:
        proc = Path(f"/proc/{pid}")
        fds = [_target(fd) for fd in (proc / "fd").iterdir()]
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return Resources(
            threads=int(status["Threads"]),
            fds=len(fds),
            sockets=sum(fd.startswith("socket:") for fd in fds),
            rss_mib=int(status["VmRSS"].split()[0]) // 1024,
        )


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:  # closed since it was listed
        return ""


class Node:
    """One server on fixed ports. Every life has its own log and its own ``baseline`` of resources."""

    def __init__(self, name: str, command: list[str], port: int, logs: Path) -> None:
        self.name = name
        self.url = f"http://{HOST}:{port}"
        self.lives = 0
        self.baseline: Resources | None = None
        self.frozen = False
        self._faults = logs / f"{name}.faults"
        own = ["--host", HOST, "--port", str(port), "--fault", f"@{self._faults}"]
        self._command = [str(BIN / command[0]), *command[1:], *own]
        self._logs = logs
        self._process = Process(name, self._command, logs / f"{name}.log")

    def command_with(self, *options: str) -> list[str]:
        """The node's command line with further options."""
        return [*self._command, *options]

    def arm(self, *faults: str) -> None:
        """The node's injected faults from now on, none without arguments. It reads them again for every room and
        message, so the file is put in place whole.
        """
        new = self._faults.with_suffix(".new")
        new.write_text("\n".join(faults), encoding="utf-8")
        os.replace(new, self._faults)

    def start(self) -> None:
        """A new life; returns at once."""
        self.lives += 1
        self.baseline = None
        self.frozen = False
        self._process = Process(self.name, self._command, self._logs / f"{self.name}-life{self.lives}.log")
        self._process.start()

    @property
    def logs(self) -> list[Path]:
        return sorted(self._logs.glob(f"{self.name}-life*.log"))

    @property
    def running(self) -> bool:
        return self._process.exit_code is None

    def resources(self) -> Resources:
        return Resources.of(self._process.pid or 0)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait_or_kill(10.0)

    async def terminate(self, timeout_s: float) -> int | None:
        """SIGTERM; the exit code, or None if the process had to be killed."""
        self._process.terminate()
        ended = await asyncio.to_thread(self._process.wait_or_kill, timeout_s)
        return self._process.exit_code if ended else None

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.frozen = False

    def stop(self, timeout_s: float) -> None:
        """The end of the run, whatever state the process is in."""
        if self.running:
            self.thaw()
            self._process.terminate()
            self._process.wait_or_kill(timeout_s)

    def check(self) -> None:
        """Raises :class:`process_pair.PairFailed` with the end of the log if the process has ended by itself."""
        self._process.check()

    async def get(self, path: str) -> httpx.Response:
        """On a connection of its own, so that none is left open between two looks at the process."""
        async with httpx.AsyncClient(base_url=self.url, timeout=10.0, trust_env=False) as client:
            return await client.get(path)

    async def info(self) -> dict[str, Any]:
        info: dict[str, Any] = (await self.get("/server_info")).json()
        return info

    async def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics`` by ``name`` or ``name{value,...}``, label values in order of their names."""
        families = text_string_to_metric_families((await self.get("/metrics")).text)
        return {_sample_name(s.name, s.labels): s.value for family in families for s in family.samples}

    async def held(self) -> list[str]:
        """What the node still holds for requests, in words; empty when it is idle."""
        metrics = await self.metrics()
        names = ["pd_queued_requests", "pd_running_requests"]
        names += [f"pd_{kind}{{{s}}}" for kind in ("slots", "pages") for s in ("reserved", "committed", "quarantined")]
        return [f"{self.name}: {name} is {metrics[name]:g}" for name in names if metrics[name]]


def _sample_name(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(value for _, value in sorted(labels.items())) + "}" if labels else name


@dataclass(frozen=True)
class Field:
    """The nodes of a run. ``bootstraps`` are the prefill nodes' control addresses, in their order."""

    decode: Node
    prefills: tuple[Node, ...]
    bootstraps: tuple[str, ...]
    relays: tuple[ControlRelay, ...] = ()
    """Between the decode node and each of them, where messages are to come late."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.prefills, self.decode)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def bootstrap(self, name: str) -> str:
        return self.bootstraps[[node.name for node in self.prefills].index(name)]

    def relay(self, name: str) -> ControlRelay:
        return self.relays[[node.name for node in self.prefills].index(name)]


@asynccontextmanager
async def running(
    seed: int,
    prefill_nodes: int,
    logs: Path,
    prefill_options: tuple[str, ...],
    decode_options: tuple[str, ...],
    *,
    relayed: bool = False,
) -> AsyncIterator[tuple[Field, Node]]:
    """A decode node with its prefill nodes, and the process that computes alone: all started, and none awaited.

    ``seed`` shuffles the pages and slots that they hand out. ``relayed``: with relays between them. All of them are
    ended on every way out.
    """
    decode_port, oracle_port, *ports = free_ports(2 + 2 * prefill_nodes)
    http, control = ports[:prefill_nodes], ports[prefill_nodes:]
    common = ["--poison", "--slots", "4", "--pages", "64", "--permute-ids"]
    prefill = ["launch_prefill", "--chunk-tokens", "64", *common]
    prefills = tuple(
        Node(
            f"prefill{i}",
            [*prefill, str(seed + i), "--bootstrap-port", str(control[i]), *prefill_options],
            http[i],
            logs,
        )
        for i in range(prefill_nodes)
    )
    addresses = tuple(f"{HOST}:{port}" for port in control)
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(control_relay(address)) for address in addresses if relayed]
        known = [relay.address for relay in relays] or addresses
        peers = [word for address in known for word in ("--prefill", address)]
        command = ["launch_decode", *peers, "--spec-tokens", "3", *common, str(seed + prefill_nodes), *decode_options]
        nodes = Field(Node("decode", command, decode_port, logs), prefills, addresses, tuple(relays))
        oracle = Node("oracle", ["launch_decode", "--local-prefill"], oracle_port, logs)
        everything = [*nodes.nodes, oracle]
        try:
            for node in everything:
                node.start()
            yield nodes, oracle
        finally:
            await asyncio.gather(*(asyncio.to_thread(node.stop, STOP_S) for node in everything))


async def until(look: Callable[[], Any], timeout_s: float) -> tuple[Any, float]:
    """Awaits ``look()`` again and again until it returns something empty; its last result, and the seconds it took.

    A node that cannot be reached counts as not yet.
    """
    started = time.monotonic()
    while True:
        try:
            left = await look()
        except httpx.TransportError as error:
            left = [f"not reachable: {error!r}"]
        if not left or time.monotonic() - started > timeout_s:
            return left, time.monotonic() - started
        await asyncio.sleep(POLL_S)
