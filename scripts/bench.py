#!/usr/bin/env python
"""Speed in one run: medians of variants measured in turn (A B A B ...), and ratios of the medians.

Decode and prefill against transformers' generate, on the same checkpoint with the same number of threads; TTFT of the
pair against one node that does both; the hand-off against one raw Mooncake write of as many bytes; the digests' share.
Starts its own servers on free ports and ends them. "local decode" is the engine in this process, "PD" the pair of
processes as an HTTP client sees it.

Exit codes: 0 done; 1 PD or local decode is slower than transformers at decoding (not with --quick); 2 the run could not
be done.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from bench_data import BenchFailed, Measurement, decode_rate, print_table, write_json
from bench_models import LocalEngine, Prompt, Transformers, node_options
from bench_raw_write import RawWriter
from bench_servers import Servers, running_servers
from evaluation.questions import BUNDLED, completion_prompt, load_problems
from process_pair import PairFailed, StopRequested, StopSignals
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.engine.tokenizer import Tokenizer
from server.node.options import BUNDLED_MODEL

RAW_WRITES_A_ROUND = 5
"""A write takes a fraction of a millisecond: each round takes the median of several."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured: requests side by side, tokens, and measured rounds after one that is thrown away."""

    batches: tuple[int, ...]
    decode_prompt: int
    decode_tokens: int
    prefill_tokens: int
    handoff_tokens: tuple[int, ...]
    rounds: int


FULL = Sizes((1, 16), 64, 128, 2048, (512, 2048), 7)
QUICK = Sizes((1, 2), 16, 24, 128, (64,), 1)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint directory (the bundled one)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one operation, in every process (1)")
    parser.add_argument("--rounds", type=int, help=f"measured rounds, at least 5 in earnest ({FULL.rounds})")
    parser.add_argument("--decode-tokens", type=int, help=f"tokens that a request decodes ({FULL.decode_tokens})")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: shows that it runs, not how fast")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything, with every value, as JSON")
    args = parser.parse_args(argv)
    for name in ("threads", "rounds", "decode_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    return args


def sizes_of(args: argparse.Namespace) -> Sizes:
    base = QUICK if args.quick else FULL
    return Sizes(
        base.batches,
        base.decode_prompt,
        args.decode_tokens or base.decode_tokens,
        base.prefill_tokens,
        base.handoff_tokens,
        args.rounds or base.rounds,
    )


@dataclass(frozen=True)
class Parts:
    """Everything that is measured, ready."""

    transformers: Transformers
    engine: LocalEngine
    servers: Servers
    raw: RawWriter


class Text:
    """Prompts of any length from the bundled questions, as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        problems = load_problems(BUNDLED / "train.jsonl")
        self._ids = [i for p in problems for i in tokenizer.encode(completion_prompt(p, [p]) + "\n\n")]

    def prompt(self, n_tokens: int, start: int = 0) -> Prompt:
        return tuple(islice(cycle(self._ids), start, start + n_tokens))


def bench(sizes: Sizes, parts: Parts, text: Text, on_step: Callable[[str], None]) -> list[Measurement]:
    """All measurements. ``on_step`` is called with a name before every round."""

    def rounds(measurement: Measurement, one_round: Callable[[Measurement], None]) -> Measurement:
        for i in range(sizes.rounds + 1):
            on_step(measurement.name)
            one_round(Measurement("warm-up", "", ()) if i == 0 else measurement)
        return measurement

    found = []
    for batch in sizes.batches:
        prompts = [text.prompt(sizes.decode_prompt, i * sizes.decode_prompt) for i in range(batch)]
        decode = Measurement(
            f"decode, {batch} request{'s' * (batch > 1)}",
            "tokens/s",
            (("local decode", "transformers"), ("PD", "transformers"), ("PD", "local decode")),
        )
        found.append(rounds(decode, partial(_decode, parts=parts, prompts=prompts, n_tokens=sizes.decode_tokens)))
    prompt = text.prompt(sizes.prefill_tokens)
    prefill = Measurement(f"prefill, {len(prompt)} tokens", "tokens/s", (("local", "transformers"),))
    found.append(rounds(prefill, partial(_prefill, parts=parts, prompt=prompt)))
    for n in sizes.handoff_tokens:
        hand_off = Measurement(
            f"hand-off, {n} tokens",
            "ms",
            (
                ("TTFT PD", "TTFT local"),
                ("hand-off", "raw write"),
                ("digests", "hand-off"),
                ("digests", "TTFT PD"),
            ),
        )
        parts.engine.prefill_s(text.prompt(n))  # so that what is digested was written before
        found.append(rounds(hand_off, partial(_hand_off, parts=parts, prompt=text.prompt(n))))
    return found


def _decode(m: Measurement, parts: Parts, prompts: Sequence[Prompt], n_tokens: int) -> None:
    m.add("transformers", decode_rate(parts.transformers.decode(prompts, n_tokens)))
    m.add("local decode", decode_rate(parts.engine.decode(prompts, n_tokens)))
    m.add("PD", decode_rate(parts.servers.decode_pair(prompts, n_tokens)))


def _prefill(m: Measurement, parts: Parts, prompt: Prompt) -> None:
    m.add("transformers", len(prompt) / parts.transformers.prefill_s(prompt))
    m.add("local", len(prompt) / parts.engine.prefill_s(prompt))


def _hand_off(m: Measurement, parts: Parts, prompt: Prompt) -> None:
    """``hand-off``: from the end of the prompt's last forward to the commit (digests on P, tail writes, check on D).

    Writes, and check with commit, are as the prefill node measures them; its digest pass, which no node reports, is the
    same code over as many bytes of the same layout here.
    """
    n = len(prompt)
    nbytes = sum(parts.engine.arena.layout.live_nbytes(n).values())
    pd = parts.servers.hand_off(prompt, nbytes)
    m.add("TTFT PD", 1e3 * pd.ttft_s)
    m.add("TTFT local", 1e3 * parts.servers.ttft_local_s(prompt))
    at_prefill_s, at_decode_s = parts.engine.digest_s(n), parts.engine.digest_s(n)
    m.add("hand-off", 1e3 * (at_prefill_s + pd.transfer_s + pd.commit_s))
    m.add("raw write", 1e3 * median(parts.raw.write_s(nbytes) for _ in range(RAW_WRITES_A_ROUND)))
    m.add("digests", 1e3 * (at_prefill_s + at_decode_s))
    m.add("of it: writes", 1e3 * pd.transfer_s)
    m.add("of it: check and commit", 1e3 * pd.commit_s)


def run(args: argparse.Namespace, console: Console, signals: StopSignals) -> int:
    sizes = sizes_of(args)
    steps = (len(sizes.batches) + 1 + len(sizes.handoff_tokens)) * (sizes.rounds + 1)
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        engine = LocalEngine(node_options(args.model, args.threads))
        stack.callback(engine.close)
        layout = engine.arena.layout
        raw = RawWriter(max(sum(layout.live_nbytes(n).values()) for n in sizes.handoff_tokens))
        stack.callback(raw.close)
        servers = stack.enter_context(running_servers(args.model, args.threads, signals))
        parts = Parts(Transformers(args.model), engine, servers, raw)
        bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*bar, console=console) as progress:
            task = progress.add_task("", total=steps, completed=-1)
            measurements = bench(
                sizes,
                parts,
                Text(engine.tokenizer),
                lambda name: progress.update(task, advance=1, description=name),
            )
            progress.update(task, advance=1)
        setting = setting_of(args, sizes, parts, load_before)
    print_table(console, measurements)
    console.print(
        f"threads of one operation, on every side: {args.threads}; rounds: {sizes.rounds}; CPUs: {setting['cpus']}; "
        f"load average: {setting['load_average_before']:.1f} -> {setting['load_average_after']:.1f}",
        highlight=False,
    )
    if args.output is not None:
        write_json(args.output, setting, measurements)
    return 0 if args.quick else _gate(measurements, console)


def setting_of(args: argparse.Namespace, sizes: Sizes, parts: Parts, load_before: float) -> dict[str, Any]:
    """What a reader must know to compare these numbers with others."""
    return {
        "model": args.model.resolve().name,
        "quick": args.quick,
        "threads": args.threads,
        "rounds": sizes.rounds,
        "decode_tokens": sizes.decode_tokens,
        "decode_prompt_tokens": sizes.decode_prompt,
        "dtype": "float32",
        "deterministic": True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "transformers_kernels": parts.transformers.kernels,
        "mooncake": parts.raw.version,
        "cpus": os.cpu_count(),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
    }


def _gate(measurements: Sequence[Measurement], console: Console) -> int:
    slower = [
        f"{m.name}: {variant} is slower than transformers"
        for m in measurements
        if m.name.startswith("decode")
        for variant in ("local decode", "PD")
        if m.ratio(variant, "transformers") <= 1
    ]
    for line in slower:
        console.print(line, style="red", highlight=False)
    return 1 if slower else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    console = Console(width=max(100, Console().width))
    with StopSignals() as signals:
        try:
            return run(args, console, signals)
        except StopRequested as stopped:
            print(f"bench: stopped by {stopped}", file=sys.stderr)
        except (BenchFailed, PairFailed) as error:
            print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
