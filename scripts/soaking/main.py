"""A chaos soak: random clients against real processes that are killed, frozen, restarted and attacked meanwhile.

Every answer is compared token for token, log probabilities included, with one process that computes alone. Nobody may
wait longer than the client's deadline, and after every episode both nodes hold nothing and no thread, socket or file
more than at their start. What happens is drawn from the seed: the same seed asks and breaks the same things again.

Exit codes: 0 nothing was found; 1 something was, see the report; 2 the servers could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path

from cluster.tool import exit_code, log_folder
from rich.console import Console

from soaking.plan import N_PREFIXES, ROOMS_PER_EPISODE, make_plan
from soaking.run import soak


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", type=int, default=100, metavar="N", help="clients in all (100)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="what happens is drawn from it (0)")
    parser.add_argument(
        "--prefill-nodes", type=int, default=1, metavar="N", help="prefill nodes beside one decode node (1)"
    )
    parser.add_argument(
        "--rooms-per-episode",
        type=int,
        choices=range(1, 65),
        default=ROOMS_PER_EPISODE,
        metavar="N",
        help=f"clients beside one disturbance, on average ({ROOMS_PER_EPISODE}; at most 64)",
    )
    parser.add_argument(
        "--prefixes",
        type=int,
        default=N_PREFIXES,
        metavar="N",
        help=f"beginnings that half of the prompts share ({N_PREFIXES}; 0: every prompt is different from its start)",
    )
    parser.add_argument(
        "--client-timeout", type=float, default=60.0, metavar="S", help="a client's deadline, seconds (60)"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M", help="end early: begin no episode after this time"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, as JSON")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the nodes' logs there (default: only on findings)"
    )
    args = parser.parse_args(argv)
    logs = log_folder(args.logs, "soak")
    return exit_code("soak", lambda: run(args, logs), logs=logs)


def run(args: argparse.Namespace, logs: Path) -> int:
    """Soaks, and prints what was found; the exit code."""
    sizes = {"prefill_nodes": args.prefill_nodes, "rooms_per_episode": args.rooms_per_episode}
    plan = make_plan(args.seed, args.rooms, n_prefixes=args.prefixes, **sizes)
    console = Console(stderr=True)
    report = asyncio.run(soak(plan, logs, console, args.client_timeout, longest_s=60 * args.minutes))
    if args.output:
        args.output.write_text(json.dumps(report.as_json(), indent=2), encoding="utf-8")
    print(report.summary)
    for finding in report.findings:
        print(
            f"soak: episode {finding.episode} ({finding.event}), room {finding.room}: {finding.what}", file=sys.stderr
        )
    if report.findings:
        print(f"soak: {len(report.findings)} findings; logs in {logs}", file=sys.stderr)
        return 1
    return 0
