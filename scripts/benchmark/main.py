"""Speed in one run: medians of variants measured in turn (A B A B ...), and ratios of the medians.

Parts, all of them if none is named:
  decode       tokens/s of the engine in this process at 1, 4, 16, 64 requests: against transformers, and against what
               the memory can give (roofline: bytes that a step must read / bytes that one core reads in a second)
  prefill      prompts of 512, 2k, 8k tokens in this process
  http         decode through the pair (PD) and through a node alone (local), both over HTTP
  ttft         time to the first token, PD and local
  handoff      from the end of the prompt to the commit, against one raw Mooncake write of as many bytes
  itl          gaps between tokens of 8 streams while 4k prompts keep arriving, PD and local on the same two cores
  growth       time to the first token, bytes and step time from 512 to 32k tokens
  speculation  time per output token with k = 0 .. 3 draft tokens
  prefix       a pair that keeps prefixes against one that does not: a long shared prefix, turn 10 of a chat, and
               nothing shared at all
  startup      from a node's command to ready

Starts its own servers on free ports and ends them. What is too slow to be measured in --seconds is measured less often,
or left out with a note. Exit codes: 0 done; 2 a part could not be measured (the others were); 130 stopped (what was
measured until then is reported).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from cluster import ClusterFailed, StopRequested
from cluster.tool import exit_code
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from server.node.options import BUNDLED_MODEL

from .checkpoints import Checkpoints
from .documents import write_documents
from .handoff import measure_handoff
from .in_process import measure_decode, measure_prefill
from .itl import measure_itl
from .measurement import BenchFailed, Measurement, write_json
from .over_http import measure_growth, measure_http, measure_ttft
from .prefix import measure_prefix
from .report import print_table, setting_of, summary
from .servers import build_kernels
from .session import QUICK, Prompts, Session, Sizes
from .speculation import measure_speculation
from .startup import measure_startup

STOPPED = 130

PARTS: dict[str, Callable[[Session], Iterator[Measurement]]] = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "http": measure_http,
    "ttft": measure_ttft,
    "handoff": measure_handoff,
    "itl": measure_itl,
    "growth": measure_growth,
    "speculation": measure_speculation,
    "prefix": measure_prefix,
    "startup": measure_startup,
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to measure: {', '.join(PARTS)} (everything)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one operation, in every process (1)")
    parser.add_argument("--rounds", type=int, help=f"most rounds of one measurement ({Sizes.rounds})")
    parser.add_argument("--seconds", type=float, help=f"about how long one measurement may take ({Sizes.seconds:g})")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: shows that it runs, not how fast")
    parser.add_argument(
        "--baseline", type=Path, metavar="DIR", help="a checkout of another commit, whose servers are measured beside"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="write everything, with every value")
    parser.add_argument(
        "--write-readme", action="store_true", help="write docs/bench.json, the picture, and the README's table"
    )
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in ("threads", "rounds", "seconds"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name} must be above 0, not {value}")
    if args.baseline is not None and not (args.baseline / "server" / "__init__.py").is_file():
        parser.error(f"--baseline {args.baseline} is no checkout of this project: it has no server/__init__.py")
    if args.write_readme and (args.quick or args.parts):
        parser.error("--write-readme needs a whole run: neither --quick nor parts")
    return args


def sizes_of(args: argparse.Namespace) -> Sizes:
    base = QUICK if args.quick else Sizes()
    return replace(base, rounds=args.rounds or base.rounds, seconds=args.seconds or base.seconds)


def run(args: argparse.Namespace) -> int:
    if args.baseline is not None:
        build_kernels(args.baseline.resolve())
    console = Console(width=max(110, Console().width))
    names = [name for name in PARTS if name in args.parts or not args.parts]
    found: list[Measurement] = []
    failed: dict[str, str] = {}
    part_s: dict[str, float] = {}
    stopped = False
    load_before = os.getloadavg()[0]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ExitStack() as stack,
    ):
        bar = progress.add_task("")
        session = Session(
            sizes_of(args),
            args.threads,
            Checkpoints(Path(folder), quick=args.quick),
            args.baseline.resolve() if args.baseline else None,
            lambda name: progress.update(bar, description=name),
            Prompts(BUNDLED_MODEL),
            stack,
        )
        for name in names:
            if stopped:
                break
            started = time.monotonic()
            try:
                for measurement in PARTS[name](session):
                    found.append(measurement)
                    progress.console.print(summary(measurement), highlight=False)
            except (BenchFailed, ClusterFailed) as error:
                failed[name] = str(error)
            except StopRequested as stop:
                stopped = True
                failed[name] = f"stopped by {stop}"
            part_s[name] = time.monotonic() - started
    setting = setting_of(session, load_before) | {"quick": args.quick, "part_s": part_s, "failed": failed}
    print_table(console, found, setting)
    for name, reason in failed.items():
        print(f"bench: {name} could not be measured: {reason}", file=sys.stderr)
    if args.output is not None:
        write_json(args.output, setting, found)
    if args.write_readme and failed:
        print("bench: the documents stay as they are, because a part is missing", file=sys.stderr)
    elif args.write_readme:
        write_documents(setting, found)
    return STOPPED if stopped else 2 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    return exit_code("bench", lambda: run(args), BenchFailed)
