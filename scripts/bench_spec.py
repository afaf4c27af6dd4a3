"""Time per output token with k draft tokens against plain decoding: local and through the pair, at 1 and at 8 requests.

Starts one prefill node and, for every k, a decode node that is its peer and one that computes prompts itself. The
bundled
questions are asked of all of them in turn, round after round, so that a noisy machine disturbs all alike. Reports
medians and ratios to k = 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from evaluation.client import Answer, Endpoint, ask_all
from evaluation.questions import BUNDLED, STOP, completion_prompt, load_problems, pick_shots
from process_pair import Pair, PairFailed, Process, StopRequested, StopSignals, free_ports
from quickstart import BIN, HOST, LOGS, wait_ready
from rich.console import Console
from rich.progress import track
from rich.table import Table

READY_TIMEOUT_S = 300.0
WHERE = ("local", "pair")


@dataclass(frozen=True)
class Variant:
    """One decode node: where its prompts are computed, its draft tokens a step, and its URL."""

    where: str
    k: int
    url: str


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
def running_nodes(ks: Sequence[int], signals: StopSignals) -> Iterator[list[Variant]]:
    """All the nodes, ready; ended on every way out. Raises :class:`PairFailed`."""
    ports = free_ports(2 + 2 * len(ks), HOST)
    bootstrap, prefill = ports[:2]
    common = ["--host", HOST, "--log-level", "error"]
    LOGS.mkdir(exist_ok=True)
    command = [str(BIN / "launch_prefill"), "--port", str(prefill), "--bootstrap-port", str(bootstrap), *common]
    processes = [Process("prefill", command, LOGS / "bench-spec-prefill.log")]
    variants = []
    for port, (where, k) in zip(ports[2:], [(w, k) for w in WHERE for k in ks], strict=True):
        source = ["--local-prefill"] if where == "local" else ["--prefill", f"{HOST}:{bootstrap}"]
        command = [str(BIN / "launch_decode"), "--port", str(port), "--spec-tokens", str(k), *source, *common]
        processes.append(Process(f"{where} k={k}", command, LOGS / f"bench-spec-{where}-{k}.log"))
        variants.append(Variant(where, k, f"http://{HOST}:{port}"))
    nodes = Pair(processes, signals)
    with ExitStack() as stack:
        stack.callback(nodes.stop)
        client = stack.enter_context(httpx.Client(trust_env=False))
        nodes.start()
        for variant in variants:
            wait_ready(nodes, client, f"http://{HOST}:{prefill}", variant.url, READY_TIMEOUT_S)
        yield variants


def ask(variant: Variant, prompts: Sequence[str], concurrency: int) -> list[Answer]:
    """Greedy answers. Raises :class:`PairFailed` if one failed: a figure over fewer answers would not compare."""

    async def run() -> list[Answer]:
        endpoint = Endpoint(variant.url, "completions", "tiny-dsv4", 64, STOP, 120.0)
        async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
            return await ask_all(client, endpoint, list(prompts), concurrency, lambda index, answer: None)

    answers = asyncio.run(run())
    if failed := [answer.error for answer in answers if answer.error is not None]:
        raise PairFailed(f"{variant.where} k={variant.k} failed a question: {failed[0]}")
    return answers


def measure(variants: Sequence[Variant], prompts: Sequence[str], rounds: int, console: Console) -> list[Figure]:
    """Every variant at 1 and 8 requests, in turn, ``rounds`` times after one warm-up."""
    found: dict[tuple[str, int, int], list[Answer]] = {}
    for i in track(range(rounds + 1), "rounds", console=console):
        for requests in (1, 8):
            for variant in variants:
                answers = ask(variant, prompts, requests)
                if i:
                    found.setdefault((variant.where, variant.k, requests), []).extend(answers)
    tpot = {key: statistics.median(a.tpot_s for a in answers if a.tpot_s is not None) for key, answers in found.items()}
    figures = []
    for (where, k, requests), answers in found.items():
        steps, accepted = sum(a.draft_steps for a in answers), sum(a.accepted for a in answers)
        ratio = tpot[where, k, requests] / tpot[where, 0, requests]
        length = 1 + accepted / steps if steps else 1.0
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
    console = Console(stderr=True)
    pool, problems = load_problems(BUNDLED / "train.jsonl"), load_problems(BUNDLED / "test.jsonl")[: args.questions]
    prompts = [completion_prompt(problem, pick_shots(problem, pool, 4, 0)) for problem in problems]
    try:
        with StopSignals() as signals, running_nodes(sorted({0, *args.ks}), signals) as variants:
            figures = measure(variants, prompts, args.rounds, console)
    except PairFailed as error:
        print(f"bench_spec: {error}", file=sys.stderr)
        return 2
    except StopRequested:
        return 130
    table = Table("where", "requests", "k", "TPOT ms", "/ k = 0", "accept length")
    for f in sorted(figures, key=lambda f: (f.where, f.requests, f.k)):
        cells = (f.where, str(f.requests), str(f.k), f"{f.tpot_ms:.2f}", f"{f.ratio:.2f}", f"{f.accept_length:.2f}")
        table.add_row(*cells)
    Console().print(table)
    if args.output is not None:
        args.output.write_text(json.dumps([vars(f) for f in figures], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
