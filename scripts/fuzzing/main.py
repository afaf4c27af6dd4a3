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
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cluster import LOGS, Node, Pair, StopRequested, StopSignals, until
from hostile.garbage import send_broken
from hostile.http_clients import Attack
from rich.console import Console
from rich.progress import track

from fuzzing.clients import attack_pair
from fuzzing.control import ToDecode, ToPrefill, attack
from fuzzing.http import run_schemathesis
from fuzzing.late import fuzz_late
from fuzzing.witness import Answers, watched

SETTLE_S = 30.0
MAX_GROWTH_MIB = 96.0
"""Of a node's resident memory, from the first answers on: ZMQ's buffers, Mooncake's endpoints, caches that fill."""
WARM_UP = 0.1
"""Share of the frames after which growth is counted: first uses of code and buffers are behind then."""


@contextmanager
def running_pair(*more_prefill: str) -> Iterator[Pair]:
    """A pair that serves. ``more_prefill`` are given to the decode node as prefill nodes as well."""
    options = ["--log-level", "warning"]
    more = [word for address in more_prefill for word in ("--prefill", address)]
    with Pair(LOGS, options, [*options, *more], prefix="fuzz-").running() as pair:
        yield pair


def judge(pair: Pair, resident_mib: dict[Node, float], answers: Answers, report: dict[str, Any]) -> list[str]:
    """What is wrong with the pair now that the noise is over; fills in ``report``."""
    mistakes = [] if settles(pair, lambda: is_free(pair)) else ["slots or pages are still held"]
    for node in pair.nodes:
        if not settles(pair, partial(is_well, node)):  # false peers are forgotten only when they fall silent
            mistakes.append(f"the {node.role} node is not well")
        now = node.resources()
        grown = now.rss_mib - resident_mib[node]
        report[node.role] = {
            "resident_mib": now.rss_mib,
            "grown_mib": round(grown, 1),
            "descriptors": now.fds,
            "log_kib": node.log.stat().st_size >> 10,
        }
        if grown > MAX_GROWTH_MIB:
            mistakes.append(f"the {node.role} node grew by {grown:.0f} MiB")
    wrong, missing = answers.wrong, answers.missing
    report["answers"] = {"right": len(answers.seconds), "wrong": len(wrong), "missing": len(missing)}
    if wrong or missing:
        mistakes.append(f"{len(wrong)} answers were wrong, {len(missing)} missing: {[*wrong, *missing][:2]}")
    return mistakes


def settles(pair: Pair, condition: Callable[[], object]) -> bool:
    """Whether ``condition`` comes true in time. Raises :class:`cluster.ClusterFailed` if a process ends meanwhile."""

    def checked() -> object:
        pair.check()
        return condition()

    with contextlib.suppress(TimeoutError):
        until(checked, SETTLE_S, "it settles")
        return True
    return False


def is_free(pair: Pair) -> bool:
    return all(node.all_free() for node in pair.nodes)


def is_well(node: Node) -> bool:
    return node.is_ok("/health") and node.is_ok("/ready")


def fuzz_zmq(n_frames: int, seed: int, console: Console) -> dict[str, Any]:
    rng, to_decode = random.Random(seed), ToDecode(random.Random(seed + 1))
    with running_pair(to_decode.address) as pair:
        info, incarnation = pair.p.info(), pair.d.info()["incarnation"]
        to_prefill = ToPrefill(pair.address, info, incarnation, random.Random(seed + 2))
        to_decode.begin(info, incarnation)
        accounts = {pair.p: to_prefill.account, pair.d: to_decode.account}
        before = {node: node.metrics() for node in pair.nodes}
        resident_mib = {node: node.resources().rss_mib for node in pair.nodes}

        def uncounted() -> list[str]:
            return [
                f"{node.role}: {line}"
                for node, account in accounts.items()
                for line in account.mistakes(before[node], node.metrics())
            ]

        with watched(pair.d.url) as answers:
            started = time.monotonic()
            sending = attack(to_prefill, to_decode, n_frames, rng)
            for n_sent in track(sending, "frames", total=n_frames, console=console, disable=not console.is_terminal):
                if n_sent == round(n_frames * WARM_UP):
                    resident_mib = {node: node.resources().rss_mib for node in pair.nodes}
            took_s = time.monotonic() - started
            settles(pair, lambda: not uncounted())
        report: dict[str, Any] = {"frames": n_frames, "seed": seed, "took_s": round(took_s, 1)}
        mistakes = judge(pair, resident_mib, answers, report) + uncounted()
        for node, account in accounts.items():
            report[node.role]["sent"] = dict(account.sent)
        to_prefill.close()
        to_decode.close()
        return report | {"mistakes": mistakes}


def fuzz_http(n_requests: int, seed: int) -> dict[str, Any]:
    with running_pair() as pair:
        resident_mib = {node: node.resources().rss_mib for node in pair.nodes}
        with watched(pair.d.url) as answers:
            started = time.monotonic()
            send_broken(pair.d.url, n_requests // 10, random.Random(seed))
            n_sent, failures = run_schemathesis(pair.d.url, n_requests, seed, LOGS)
            took_s = time.monotonic() - started
        report: dict[str, Any] = {"requests": n_sent, "seed": seed, "took_s": round(took_s, 1)}
        mistakes = failures + judge(pair, resident_mib, answers, report)
        return report | {"mistakes": mistakes}


def fuzz_clients(seconds: float, seed: int, attacks: Sequence[Attack]) -> dict[str, Any]:
    with running_pair() as pair:
        started = time.monotonic()
        seen, mistakes = attack_pair(pair, attacks, seed, seconds)
        if not settles(pair, lambda: is_free(pair)):
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
    try:
        with StopSignals():
            return run(args, Console())
    except StopRequested:
        return 130


def run(args: argparse.Namespace, console: Console) -> int:
    """Fuzzes, and prints the report; the exit code."""
    match args.command:
        case "zmq":
            report = fuzz_zmq(args.number, args.seed, console)
        case "http":
            report = fuzz_http(args.number, args.seed)
        case "late":
            report = fuzz_late(args.number, args.seed)
        case _:
            report = fuzz_clients(args.seconds, args.seed, args.attacks)
    console.print_json(json.dumps(report))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if report["mistakes"] else 0
