"""Time per output token with k draft tokens against plain decoding: local and through the pair, at 1 and at 8 requests.

Starts one prefill node and, for every k, a decode node that is its peer and one that computes prompts itself. The
bundled questions are asked of all of them in turn, round after round, so that a noisy machine disturbs all alike.
Reports medians and ratios to k = 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import LOGS, Cluster, Node
from cluster.tool import exit_code
from evaluation.client import Answer, ServerDied, accept_length, ask_bundled_model
from evaluation.questions import bundled_questions
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .measurement import BenchFailed

READY_TIMEOUT_S = 300.0

Variant = tuple[str, int]
"""Where a decode node's prompts are computed, "local" or "pair", and its draft tokens a step."""


@dataclass(frozen=True)
class Figure:
    """Medians of one variant at one concurrency. ``ratio`` is to k = 0 of the same place and concurrency."""

    where: str
    k: int
    requests: int
    tpot_ms: float
    ratio: float
    accept_length: float


@contextmanager
def running_nodes(ks: Sequence[int]) -> Iterator[dict[Variant, Node]]:
    """The decode nodes, ready; ended on every way out. Raises :class:`ClusterFailed`."""
    common = ("--log-level", "error")
    prefill = Node("prefill", LOGS / "bench-spec-prefill.log", *common)
    sources = {"local": ["--local-prefill"], "pair": ["--prefill", prefill.address]}
    nodes = {
        (where, k): Node(
            "decode",
            LOGS / f"bench-spec-{where}-{k}.log",
            *("--spec-tokens", str(k), *source, *common),
            name=f"{where} k={k}",
        )
        for where, source in sources.items()
        for k in ks
    }
    with Cluster([prefill, *nodes.values()]).running(READY_TIMEOUT_S):
        yield nodes


def ask(node: Node, prompts: Sequence[str], concurrency: int) -> list[Answer]:
    """Greedy answers. Raises :class:`BenchFailed` if one failed: a figure over fewer answers would not compare."""
    answers = ask_bundled_model(node.url, prompts, concurrency)
    if failed := [answer.error for answer in answers if answer.error is not None]:
        raise BenchFailed(f"{node.name} failed a question: {failed[0]}")
    return answers


def measure(nodes: dict[Variant, Node], prompts: Sequence[str], rounds: int, console: Console) -> list[Figure]:
    """Every variant at 1 and 8 requests, in turn, ``rounds`` times after one warm-up."""
    found: dict[tuple[str, int, int], list[Answer]] = {}
    for i in track(range(rounds + 1), "rounds", console=console):
        for requests in (1, 8):
            for variant, node in nodes.items():
                answers = ask(node, prompts, requests)
                if i:
                    found.setdefault((*variant, requests), []).extend(answers)
    tpot = {key: statistics.median(a.tpot_s for a in answers if a.tpot_s is not None) for key, answers in found.items()}
    figures = []
    for (where, k, requests), answers in found.items():
        ratio = tpot[where, k, requests] / tpot[where, 0, requests]
        length = accept_length(answers) or 1.0
        figures.append(Figure(where, k, requests, 1e3 * tpot[where, k, requests], ratio, length))
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--ks", type=int, nargs="+", default=[0, 1, 2, 3], metavar="K", help="draft tokens (0 included)"
    )
    parser.add_argument("--questions", type=int, default=8, metavar="N", help="questions of each round")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds after the warm-up")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(argv)
    return exit_code("bench_spec", lambda: run(args), BenchFailed, ServerDied)


def run(args: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes the figures."""
    console = Console(stderr=True)
    prompts = [prompt for _, prompt in bundled_questions()[: args.questions]]
    with running_nodes(sorted({0, *args.ks})) as nodes:
        figures = measure(nodes, prompts, args.rounds, console)
    table = Table("where", "requests", "k", "TPOT ms", "/ k = 0", "accept length")
    for f in sorted(figures, key=lambda f: (f.where, f.requests, f.k)):
        cells = (f.where, str(f.requests), str(f.k), f"{f.tpot_ms:.2f}", f"{f.ratio:.2f}", f"{f.accept_length:.2f}")
        table.add_row(*cells)
    Console().print(table)
    if args.output is not None:
        args.output.write_text(json.dumps([vars(f) for f in figures], indent=1), encoding="utf-8")
    return 0
