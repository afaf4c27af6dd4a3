"""Fuzzes a pair of its own, while a client keeps asking and every answer must stay right.

    scripts/fuzz.py zmq --frames 20000 --seed 1      random and damaged frames at both ends of the control connection
    scripts/fuzz.py http --requests 2000 --seed 1    schemathesis against the decode node's own /openapi.json
    scripts/fuzz.py clients --seconds 10 --seed 1    big bodies, lists and heads, slow and silent clients, at each node
    scripts/fuzz.py late --rounds 10 --seed 1        control messages of an earlier registration, delivered late

The exit code is 1 if a process ended or hung, an answer was wrong or missing, memory grew beyond the limit, or the
nodes' counters do not add up to what was sent. ``clients`` reports p50 and p99 of small requests, quiet and beside each
attack; there a small request must be answered within 10 s, no peer be lost, and memory return to within 10 %.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from fuzz_clients import attack_pair
from fuzz_http import run_schemathesis, send_broken
from fuzz_late import fuzz_late
from fuzz_zmq import ToDecode, ToPrefill, Witness, attack, n_descriptors, resident_mib, watched
from hostile_clients import Attack
from process_pair import Pair, Process, StopSignals, free_ports
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import track

BIN = Path(sys.executable).parent
LOGS = Path(__file__).resolve().parent.parent / ".run"
HOST = "127.0.0.1"
START_S, SETTLE_S = 120.0, 30.0
MAX_GROWTH_MIB = 96.0
"""Of a node's resident memory, from the first answers on: ZMQ's buffers, Mooncake's endpoints, caches that fill."""
WARM_UP = 0.1
"""Share of the frames after which growth is counted: first uses of code and buffers are behind then."""


@dataclass
class Node:
    """One node of the pair, and how it was before."""

    role: str
    url: str
    process: Process
    before: dict[str, float]
    resident_mib: float = 0.0

    @property
    def pid(self) -> int:
        if self.process.pid is None:
            raise RuntimeError(f"the {self.role} node was not started")
        return self.process.pid

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = httpx.get(f"{self.url}/server_info", timeout=30).json()
        return info

    def metrics(self) -> dict[str, float]:
        """Samples by ``name{label=value}``."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {s.name + "".join(f"{{{name}={value}}}" for name, value in s.labels.items()): s.value for s in samples}

    def is_ok(self, path: str) -> bool:
        try:
            return httpx.get(f"{self.url}{path}", timeout=30).is_success
        except httpx.TransportError:
            return False

    def is_idle(self) -> bool:
        counts = self.info()["allocator"].values()
        return not any(n for kind in counts for state, n in kind.items() if state != "free")


def wait(condition: Callable[[], bool], timeout_s: float, pair: Pair) -> bool:
    """Whether ``condition`` came true in time; raises if a process ends meanwhile."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pair.check()
        if condition():
            return True
        time.sleep(0.1)
    return False


@contextmanager
def running_pair(*more_prefill: str) -> Iterator[tuple[Pair, Node, Node, str]]:
    """A pair that serves: prefill, decode, and the bootstrap address. ``more_prefill`` are told to decode as well."""
    bootstrap, p_port, d_port = free_ports(3)
    address = f"{HOST}:{bootstrap}"
    LOGS.mkdir(exist_ok=True)
    prefill = [str(BIN / "launch_prefill"), "--port", str(p_port), "--bootstrap-port", str(bootstrap)]
    decode = [str(BIN / "launch_decode"), "--port", str(d_port)]
    for each in (address, *more_prefill):
        decode += ["--prefill", each]
    processes = [
        Process(role, [*command, "--log-level", "warning"], LOGS / f"fuzz-{role}.log")
        for role, command in (("prefill", prefill), ("decode", decode))
    ]
    with StopSignals() as signals:
        pair = Pair(processes, signals)
        nodes = [
            Node(process.name, f"http://{HOST}:{port}", process, {})
            for process, port in zip(processes, (p_port, d_port), strict=True)
        ]
        try:
            pair.start()
            if not wait(lambda: all(node.is_ok("/ready") for node in reversed(nodes)), START_S, pair):
                raise TimeoutError(f"the pair was not ready within {START_S:g} s; see {LOGS}")
            yield pair, nodes[0], nodes[1], address
        finally:
            pair.stop()


def is_well(node: Node) -> bool:
    return node.is_ok("/health") and node.is_ok("/ready")


def judge(pair: Pair, nodes: Sequence[Node], witness: Witness, report: dict[str, Any]) -> list[str]:
    """What is wrong with the pair now that the noise is over; fills in ``report``."""
    mistakes = []
    pair.check()
    if not wait(lambda: all(node.is_idle() for node in nodes), SETTLE_S, pair):
        mistakes.append("slots or pages are still held")
    for node in nodes:
        if not wait(partial(is_well, node), SETTLE_S, pair):  # false peers are forgotten only when they fall silent
            mistakes.append(f"the {node.role} node is not well")
        grown = resident_mib(node.pid) - node.resident_mib
        report[node.role] = {
            "resident_mib": round(resident_mib(node.pid), 1),
            "grown_mib": round(grown, 1),
            "descriptors": n_descriptors(node.pid),
            "log_kib": node.process.log.stat().st_size >> 10,
        }
        if grown > MAX_GROWTH_MIB:
            mistakes.append(f"the {node.role} node grew by {grown:.0f} MiB")
    report["answers"] = {"right": witness.right, "wrong": witness.wrong, "missing": len(witness.failures)}
    if witness.wrong or witness.failures:
        mistakes.append(f"{witness.wrong} answers were wrong, {len(witness.failures)} missing: {witness.failures[:2]}")
    return mistakes


def fuzz_zmq(n_frames: int, seed: int, console: Console) -> dict[str, Any]:
    rng, to_decode = random.Random(seed), ToDecode(random.Random(seed + 1))
    with running_pair(to_decode.address) as (pair, p, d, address):
        nodes = (p, d)
        to_prefill = ToPrefill(address, p.info(), d.info()["incarnation"], random.Random(seed + 2))
        to_decode.begin(p.info(), d.info()["incarnation"])
        for node in nodes:
            node.before, node.resident_mib = node.metrics(), resident_mib(node.pid)
        with watched(d.url) as witness:
            started = time.monotonic()
            sending = attack(to_prefill, to_decode, n_frames, rng)
            for n_sent in track(sending, "frames", total=n_frames, console=console, disable=not console.is_terminal):
                if n_sent == round(n_frames * WARM_UP):
                    for node in nodes:
                        node.resident_mib = resident_mib(node.pid)
            took_s = time.monotonic() - started
            accounts = ((p, to_prefill.account), (d, to_decode.account))
            wait(lambda: all(not a.mistakes(n.before, n.metrics()) for n, a in accounts), SETTLE_S, pair)
        report: dict[str, Any] = {"frames": n_frames, "seed": seed, "took_s": round(took_s, 1)}
        mistakes = judge(pair, nodes, witness, report)
        for node, account in accounts:
            mistakes += [f"{node.role}: {line}" for line in account.mistakes(node.before, node.metrics())]
            report[node.role]["sent"] = dict(account.sent)
        to_prefill.close()
        to_decode.close()
        return report | {"mistakes": mistakes}


def fuzz_http(n_requests: int, seed: int, _console: Console) -> dict[str, Any]:
    with running_pair() as (pair, p, d, _):
        for node in (p, d):
            node.before, node.resident_mib = node.metrics(), resident_mib(node.pid)
        with watched(d.url) as witness:
            started = time.monotonic()
            send_broken(d.url, n_requests // 10, random.Random(seed))
            n_sent, failures = run_schemathesis(d.url, n_requests, seed, LOGS)
            took_s = time.monotonic() - started
        report: dict[str, Any] = {"requests": n_sent, "seed": seed, "took_s": round(took_s, 1)}
        mistakes = failures + judge(pair, (p, d), witness, report)
        return report | {"mistakes": mistakes}


def fuzz_clients(seconds: float, seed: int, attacks: Sequence[Attack]) -> dict[str, Any]:
    with running_pair() as (pair, p, d, _):
        started = time.monotonic()
        seen, mistakes = attack_pair(p, d, attacks, seed, seconds)
        pair.check()
        if not wait(lambda: p.is_idle() and d.is_idle(), SETTLE_S, pair):
            mistakes.append("slots or pages are still held")
    return {"seed": seed, "took_s": round(time.monotonic() - started, 1), **seen, "mistakes": mistakes}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report there, as JSON")
    commands = parser.add_subparsers(dest="command", required=True)
    counted = (("zmq", "frames", 20_000), ("http", "requests", 2_000), ("late", "rounds", 10), ("clients", "", 0))
    for name, what, most in counted:
        command = commands.add_parser(name, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        if what:
            command.add_argument(f"--{what}", dest="number", type=int, default=most, metavar="N", help="how many")
        command.add_argument("--seed", type=int, default=1, help="the same seed sends the same")
    command.add_argument("--seconds", type=float, default=10.0, metavar="S", help="for each attack at each node")
    command.add_argument("--attacks", nargs="+", type=Attack, choices=list(Attack), default=list(Attack), help="which")
    args = parser.parse_args(argv)
    console = Console()
    match args.command:
        case "zmq":
            report = fuzz_zmq(args.number, args.seed, console)
        case "http":
            report = fuzz_http(args.number, args.seed, console)
        case "late":
            report = fuzz_late(args.number, args.seed)
        case _:
            report = fuzz_clients(args.seconds, args.seed, args.attacks)
    console.print_json(json.dumps(report))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if report["mistakes"] else 0


if __name__ == "__main__":
    sys.exit(main())
