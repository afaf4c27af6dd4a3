"""What is measured through HTTP: a prefill/decode pair, and one node that does both, each in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import LOGS, ROOT, Cluster, Node, until

from .client import ttft_s
from .measurement import BenchFailed, Prompt
from .session import Session

READY_TIMEOUT_S = 180.0
COUNTED_TIMEOUT_S = 30.0
PD, LOCAL, BASELINE = "PD", "local", ", baseline"
PAGES, SLOTS = 1200, 64
CORES = 2
OPTIONS = Path("server", "node", "options.py")
"""Where a checkout has its options."""
HAND_OFF_PHASES = ("digest", "transfer", "commit")
"""Of ``pd_phase_seconds``: from the end of a prompt's last forward until the decode node has committed its state."""


@dataclass(frozen=True)
class HandOff:
    """One prompt's way: ``phases_s`` are the seconds of every phase that the prefill node measures, ``pieces`` the
    contiguous writes that its state came in.
    """

    ttft_s: float
    phases_s: dict[str, float]
    pieces: int


@dataclass(frozen=True)
class Server:
    """Who answers: ``node``, and the ``prefill`` node behind it, if any."""

    node: Node
    prefill: Node | None = None

    @property
    def url(self) -> str:
        return self.node.url

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.prefill, self.node) if node is not None]

    def moved(self) -> int:
        """Bytes of state that came so far."""
        return sum(self.node.transfer_bytes().values())

    def pieces(self) -> int:
        """Contiguous writes that it came in so far."""
        return int(self.node.samples("pd_transfer_pieces_total")[()])

    def hand_off(self, prompt: Prompt, nbytes: int) -> HandOff:
        """One prompt through the pair. Raises :class:`BenchFailed` unless exactly ``nbytes`` of state moved for it."""
        if self.prefill is None:
            raise ValueError("a node alone hands nothing over")
        p = self.prefill
        before, moved_before, pieces_before = phases_of(p), self.moved(), self.pieces()
        n_before = n_committed(p)
        ttft = ttft_s(self.url, prompt)
        try:  # the prefill node counts a room a moment after the decode node has answered
            until(lambda: n_committed(p) == n_before + 1, COUNTED_TIMEOUT_S, "the room is in pd_phase_seconds")
        except TimeoutError as error:
            raise BenchFailed(f"the prefill node: {error}") from error
        if (moved := self.moved() - moved_before) != nbytes:
            raise BenchFailed(f"{moved} bytes were moved for {len(prompt)} prompt tokens, expected {nbytes}")
        seconds = {name: seconds - before.get(name, 0.0) for name, seconds in phases_of(p).items()}
        return HandOff(ttft, seconds, self.pieces() - pieces_before)


def n_committed(prefill: Node) -> float:
    return prefill.samples("pd_phase_seconds_count").get(("commit",), 0.0)


def phases_of(prefill: Node) -> dict[str, float]:
    """Seconds of all rooms so far by phase."""
    return {phase: seconds for (phase,), seconds in prefill.samples("pd_phase_seconds_sum").items()}


def program(role: str, baseline: Path | None) -> Sequence[str]:
    """The command of a node: this one's, or that of the checkout ``baseline``, in this environment."""
    if baseline is None:
        return ()
    return ("env", f"PYTHONPATH={baseline}", sys.executable, "-P", "-m", f"server.{role}")


def build_kernels(baseline: Path) -> None:
    """Compiles the kernels of the checkout ``baseline``, if it has any: without them it would measure its Python model.

    Raises :class:`BenchFailed` with what the compiler said.
    """
    if not (baseline / "server" / "kernels" / "build.py").is_file():
        return
    command = (sys.executable, "-P", "-m", "server.kernels.build")
    env = os.environ | {"PYTHONPATH": str(baseline)}
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchFailed(f"the kernels of --baseline cannot be built: {done.stderr.strip()}")


def without_prefixes(baseline: Path | None) -> tuple[str, ...]:
    """The option that keeps nothing of a prompt: the parts ask the same ones again and again, and measure how they are
    computed. None for a checkout that never keeps anything.
    """
    if baseline is not None and not (baseline / OPTIONS).is_file():
        return ()
    keeps = "--prefix-cache" in ((baseline or ROOT) / OPTIONS).read_text(encoding="utf-8")
    return ("--prefix-cache", "off") if keeps else ()


def prefill_node(name: str, options: Sequence[str], baseline: Path | None = None) -> Node:
    return Node("prefill", LOGS / f"bench-{name}-prefill.log", *options, program=program("prefill", baseline))


def decode_node(name: str, prefill: Node | None, options: Sequence[str], baseline: Path | None = None) -> Node:
    """Without ``prefill`` one that computes prompts itself."""
    source = ("--local-prefill",) if prefill is None else ("--prefill", prefill.address)
    log = LOGS / f"bench-{name}-decode.log"
    return Node("decode", log, *source, *options, name=f"{name} decode", program=program("decode", baseline))


def a_pair(name: str, options: Sequence[str], baseline: Path | None = None, *, keeps_prefixes: bool = False) -> Server:
    if not keeps_prefixes:
        options = (*options, *without_prefixes(baseline))
    prefill = prefill_node(name, options, baseline)
    return Server(decode_node(name, prefill, options, baseline), prefill)


def node_options(session: Session, checkpoint: str, *, pages: int = PAGES, slots: int = SLOTS) -> tuple[str, ...]:
    model = ("--model", str(session.checkpoints.path(checkpoint)))
    sizes = ("--threads", session.threads, "--pages", pages, "--slots", slots)
    return (*model, *map(str, sizes), "--log-level", "warning")


@contextmanager
def running(servers: dict[str, Server]) -> Iterator[dict[str, Server]]:
    """The servers, ready; ended on every way out. Raises :class:`cluster.ClusterFailed`."""
    with Cluster([node for server in servers.values() for node in server.nodes]).running(READY_TIMEOUT_S):
        yield servers


def pair_and_local(options: Sequence[str], baseline: Path | None) -> dict[str, Server]:
    """A pair and a node alone, and the same of the baseline, if there is one."""
    servers = {PD: a_pair("pair", options), LOCAL: Server(decode_node("alone", None, options))}
    if baseline is not None:
        servers[PD + BASELINE] = a_pair("baseline-pair", options, baseline)
        servers[LOCAL + BASELINE] = Server(decode_node("baseline-alone", None, options, baseline))
    return servers


def bundled_servers(session: Session) -> dict[str, Server]:
    """Those of :func:`pair_and_local` with the bundled weights and room for long prompts.

    Started when a part needs them first, on two cores, and kept for the next. Raises :class:`cluster.ClusterFailed`.
    """
    if not session.servers:
        servers = pair_and_local(node_options(session, "bundled, long"), session.baseline)
        with same_cores():
            session.stack.enter_context(running(servers))
        session.servers.update(servers)
    for server in session.servers.values():
        for node in server.nodes:
            node.check()
    return session.servers


@contextmanager
def same_cores() -> Iterator[None]:
    """Everything that is started meanwhile, and this process, runs on the first two cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
