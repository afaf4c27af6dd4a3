"""Several nodes that live and end together."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Self

from cluster.node import START_S, Node
from cluster.ports import HOST
from cluster.signals import StopSignals
from cluster.wait import until

STOP_S = 15.0
"""For every process to end in order."""
FREE_S = 20.0
POLL_S = 0.2


class Cluster:
    """Nodes that are started in order, checked together, and ended together, the last one first."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)

    @contextmanager
    def running(self, timeout_s: float = START_S) -> Iterator[Self]:
        """The nodes, ready; ended on every way out. Raises :class:`ClusterFailed` if they do not become ready."""
        try:
            self.start()
            self.wait_ready(timeout_s)
            yield self
        finally:
            self.stop()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[Self]:
        """The nodes, which are not awaited; ended on every way out, while the loop goes on (a relay may be in it)."""
        try:
            self.start()
            yield self
        finally:
            await asyncio.to_thread(self.stop)

    def start(self) -> None:
        """Starts all. A stop signal meanwhile is raised once every process is known, so that none is left behind."""
        with StopSignals.deferred():
            for node in self.nodes:
                node.start()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Waits until every prefill node lives and every decode node has proved a transfer."""
        started = time.monotonic()
        for node in self.nodes:
            node.wait_for(node.ready_path, timeout_s, since=started, beside=self.nodes)

    def check(self) -> None:
        """Raises :class:`ClusterFailed` for the first process that has ended."""
        for node in self.nodes:
            node.check()

    def check_for(self, seconds: float) -> None:
        """As :meth:`check`, again and again: a broken connection is seen a little before the death behind it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(POLL_S / 4)

    def held(self) -> list[str]:
        """What the nodes hold for requests, in words."""
        return [what for node in self.nodes for what in node.held()]

    def totals(self, name: str) -> Counter[tuple[str, ...]]:
        """The counters called ``name``, all nodes together, by the values of their labels in order of their names."""
        found: Counter[tuple[str, ...]] = Counter()
        for node in self.nodes:
            found.update({labels: int(value) for labels, value in node.samples(name).items()})
        return found

    def wait_all_free(self, timeout_s: float = FREE_S) -> None:
        until(lambda: all(node.all_free() for node in self.nodes), timeout_s, "every slot and page is free")

    def heal(self) -> None:
        """Starts what does not run, and waits until the nodes serve and hold nothing."""
        for node in self.nodes:
            if not node.running:
                node.start()
        self.wait_ready()
        self.wait_all_free()

    def stop(self, timeout_s: float | None = None, drain_s: float | None = None) -> None:
        """Asks every process to end, whatever state it is in, and kills what has not ended after ``timeout_s``.

        After ``drain_s`` a second signal cuts short what is under way.
        """
        StopSignals.ignore()
        timeout_s = STOP_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        self._end_by(deadline if drain_s is None else time.monotonic() + drain_s)
        self._end_by(deadline)
        for node in reversed(self.nodes):
            if node.running:
                node.kill()
                print(f"{node.name} did not end within {timeout_s:g} s and was killed; see {node.log}")
            node.http.close()

    def _end_by(self, deadline: float) -> None:
        left = [node for node in reversed(self.nodes) if node.running]
        for node in left:
            node.thaw()
            node.signal(SIGTERM)
        for node in left:
            try:
                node.wait_ended(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                continue


class Pair(Cluster):
    """A prefill node ``p``, which decode nodes know as ``address``, and a decode node ``d`` of it.

    ``prefill`` and ``decode`` are further options. Their logs are in ``logs``, with names that begin with ``prefix``.
    """

    def __init__(
        self,
        logs: Path,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        *,
        host: str = HOST,
        prefix: str = "",
        faulty: bool = False,
    ) -> None:
        self.p = Node("prefill", logs / f"{prefix}prefill.log", *prefill, host=host, faulty=faulty)
        self.address = self.p.address
        log = logs / f"{prefix}decode.log"
        self.d = Node("decode", log, "--prefill", self.address, *decode, host=host, faulty=faulty)
        super().__init__([self.p, self.d])

    def arm(self, *, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> None:
        """The faults of both nodes from now on; none without arguments."""
        self.p.arm(*prefill)
        self.d.arm(*decode)
