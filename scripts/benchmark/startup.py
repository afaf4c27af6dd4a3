"""Seconds from a node's command to the moment when it is ready, as a client sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from cluster import Cluster, Node

from .measurement import Measurement
from .servers import BASELINE, LOCAL, PD, READY_TIMEOUT_S, node_options, pair_and_local
from .session import Session

PREFILL = "prefill node alone"
MOST_ROUNDS = 3


def measure_startup(session: Session) -> Iterator[Measurement]:
    """A pair (both commands at once, until a transfer has arrived), a node alone, and a prefill node."""
    m = Measurement(
        "startup",
        "start-up, from command to ready",
        "s",
        ((PD, PD + BASELINE), (LOCAL, LOCAL + BASELINE), (PREFILL, PREFILL + BASELINE)),
    )

    options = node_options(session, "bundled", pages=256, slots=32)

    for server in pair_and_local(options, session.baseline).values():
        if server.prefill is not None:  # Python compiles what it imports, and the files come from the disk, only once
            session.on_step(f"{m.name}: warm-up")
            _start_s(server.nodes)
    for _ in range(min(MOST_ROUNDS, session.sizes.rounds)):
        session.on_step(m.name)
        for name, server in pair_and_local(options, session.baseline).items():
            m.add(name, _start_s(server.nodes))
        for name, server in pair_and_local(options, session.baseline).items():
            if server.prefill is not None:
                m.add(PREFILL + name.removeprefix(PD), _start_s([server.prefill]))
    yield m


def _start_s(nodes: Sequence[Node]) -> float:
    cluster = Cluster(nodes)
    started = perf_counter()
    with cluster.running(READY_TIMEOUT_S):
        return perf_counter() - started
