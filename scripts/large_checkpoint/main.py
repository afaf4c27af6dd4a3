"""Serves a checkpoint by a pair whose processes may take less memory than its weights: are the tokens those of a pair
without a limit, how many tokens a second are there, and how many bytes are read from disk for each?

  make_checkpoint.py DIR --config flash --set num_hidden_layers=26 --set hidden_size=2048 ...
  large_checkpoint.py DIR --limit 2GiB --more 8GiB

Each process is put into a memory control group where one can be made; where not, its resident set is bounded by
--weights-memory alone, and the table says so. Before each run the page cache forgets the checkpoint's files (but for
what another process maps).

Exit codes: 0 the tokens are the same, 1 they are not, 2 the servers could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cluster.node import ClusterFailed, Node
from cluster.nodes import Pair
from cluster.tool import exit_code, log_folder
from rich.console import Console
from rich.table import Table

from server.sizes import nbytes_of, size

from .control_group import ControlGroup, NoControlGroup

START_S = 1800.0
"""For the first start, which reads the whole checkpoint for its fingerprint."""
ANSWER_S = 3600.0
SLOW_PHASES = ("queued", "prefill", "transfer")
SHARE = 0.55
"""Of a process's limit that weights may take: the rest is for Python, libraries, pools and the page cache."""


@dataclass(frozen=True)
class Run:
    """``prefill_s`` until the first token, ``decode_s`` for the others. Bytes of both nodes, prefill first."""

    name: str
    weights_memory: int
    tokens: list[Any]
    """Each with its log probability."""
    prefill_s: float
    decode_s: float
    read_from_disk: list[int]
    mapped: list[int]
    peaks: list[int]
    limited: str

    @property
    def tokens_per_s(self) -> float:
        return (len(self.tokens) - 1) / self.decode_s


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="DIR", help="the checkpoint")
    parser.add_argument("--limit", type=_nbytes, default="2GiB", metavar="BYTES", help="of each process (2GiB)")
    parser.add_argument("--more", type=_nbytes, default="8GiB", metavar="BYTES", help="for another run (8GiB)")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="of the prompt (64)")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="to generate (16)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of the nodes (bfloat16)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each node (2)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where the nodes' logs go (default: a new folder)")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.prompt_tokens < 1:
        parser.error("a prompt of at least 1 token and an answer of at least 2 are needed")
    return args


def _nbytes(text: str) -> int:
    try:
        return nbytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace, logs: Path, name: str, limit: int) -> Run:
    """One pair from its start to its end. A ``limit`` of 0 is none."""
    weights_memory = int(SHARE * limit) if limit else 2 * _size_of(args.model)
    options = [
        *("--model", str(args.model), "--dtype", args.dtype, "--threads", str(args.threads), "--pages", "16"),
        *("--slots", "2", "--kernels", "cpu", "--weights", "packed", "--weights-memory", str(weights_memory)),
        *(word for phase in SLOW_PHASES for word in ("--deadline", f"{phase}={ANSWER_S:g}")),
    ]
    with ExitStack() as stack:
        pair = Pair(logs, options, options, prefix=f"{name.replace(' ', '-')}-")
        limited = _limit(pair, limit, stack) if limit else "no limit"
        _drop_cache(args.model)
        stack.enter_context(pair.running(START_S))
        before = [_read_from_disk(node) for node in pair.nodes]
        counted = [node.info()["weights"]["read_nbytes"] for node in pair.nodes]
        tokens, prefill_s, decode_s = _ask(pair.d, args)
        return Run(
            name,
            weights_memory,
            tokens,
            prefill_s,
            decode_s,
            [_read_from_disk(node) - n for node, n in zip(pair.nodes, before, strict=True)],
            [node.info()["weights"]["read_nbytes"] - n for node, n in zip(pair.nodes, counted, strict=True)],
            [_peak(node) for node in pair.nodes],
            limited,
        )


def _limit(pair: Pair, limit: int, stack: ExitStack) -> str:
    """Makes a group for each node; in words, what bounds them."""
    try:
        for node in pair.nodes:
            group = ControlGroup(f"dsv4-{node.role}", limit)
            stack.callback(group.remove)
            node.command = [*group.joining(), *node.command]
    except NoControlGroup as error:
        return f"no control group ({error}): --weights-memory alone"
    return f"each process in a control group of {size(limit)}"


def _ask(node: Node, args: argparse.Namespace) -> tuple[list[Any], float, float]:
    """Greedy tokens with their log probabilities, and the seconds until the first one and for the others."""
    prompt = [3 + (i * 7919) % 400 for i in range(args.prompt_tokens)]
    body = {"prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    found: list[Any] = []
    times = [time.monotonic()]
    with node.http.stream("POST", "/v1/completions", json=body | {"stream": True}, timeout=ANSWER_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    found += zip(
                        *((choice["logprobs"] or {}).get(k, ()) for k in ("tokens", "token_logprobs")), strict=True
                    )
                times.append(time.monotonic())
    if len(found) != args.tokens:
        raise ClusterFailed(f"{len(found)} tokens came instead of {args.tokens}: see {node.log}")
    return found, times[1] - times[0], max(times[-1] - times[1], 1e-3)


def _size_of(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _drop_cache(model: Path) -> None:
    """Lets the system forget the pages of the checkpoint's files that no process maps. Needs no rights."""
    for file in model.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_from_disk(node: Node) -> int:
    lines = Path(f"/proc/{node.pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _peak(node: Node) -> int:
    """The largest resident set that the process had."""
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) << 10


def show(runs: Sequence[Run], args: argparse.Namespace, console: Console) -> None:
    title = f"{args.model.name}: {size(_size_of(args.model))} of weights, {args.prompt_tokens} prompt tokens"
    table = Table(title=f"{title}; two numbers: prefill node, decode node", min_width=len(title))
    for column in ("process", "weights", "prompt", "tokens/s", "read from disk", "disk, a token", "most resident"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in runs:
        table.add_row(
            one.name,
            size(one.weights_memory),
            f"{one.prefill_s:.1f} s",
            f"{one.tokens_per_s:.2f}",
            ", ".join(size(n) for n in one.read_from_disk),
            size(one.read_from_disk[1] / (len(one.tokens) - 1)),
            ", ".join(size(n) for n in one.peaks),
        )
    console.print(table)
    for one in runs:
        passed = size(one.mapped[1] / (len(one.tokens) - 1))
        console.print(
            f"{one.name}: {one.limited}; {passed} of weights came into memory for a token, from disk or cache"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logs, console = log_folder(args.logs, "large-checkpoint"), Console(width=120)

    def work() -> int:
        limits = {"no limit": 0, size(args.limit): args.limit, size(args.more): args.more}
        runs = []
        for name, limit in limits.items():
            runs.append(run(args, logs, name, limit))
            console.print(
                f"{name}: {runs[-1].tokens_per_s:.2f} tokens/s, {[logprob for _, logprob in runs[-1].tokens]}"
            )
        show(runs, args, console)
        same = all(one.tokens == runs[0].tokens for one in runs)
        factor = runs[2].tokens_per_s / runs[1].tokens_per_s
        console.print(
            f"tokens {'the same' if same else 'DIFFERENT'}; {size(args.more)} is {factor:.2f} times as fast as "
            f"{size(args.limit)}"
        )
        return 0 if same else 1

    return exit_code("large_checkpoint", work, OSError, httpx.HTTPError, logs=logs)
