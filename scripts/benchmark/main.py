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
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from cluster import ClusterFailed, StopRequested, StopSignals
from evaluation.questions import BUNDLED, completion_prompt, load_problems
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.node.options import BUNDLED_MODEL

from .local_engine import LocalEngine
from .measurement import BenchFailed, Measurement, Prompt, decode_rate, print_table, write_json
from .raw_write import RawWriter
from .reference import Transformers
from .servers import Servers, running_servers

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
    return replace(base, decode_tokens=args.decode_tokens or base.decode_tokens, rounds=args.rounds or base.rounds)


DECODE_RATIOS = (("local decode", "transformers"), ("PD", "transformers"), ("PD", "local decode"))
HAND_OFF_RATIOS = (
    ("TTFT PD", "TTFT local"),
    ("hand-off", "raw write"),
    ("digests", "hand-off"),
    ("digests", "TTFT PD"),
)


class Bench:
    """Everything that is measured, ready. ``on_step`` is called with a name before every round."""

    def __init__(
        self,
        sizes: Sizes,
        transformers: Transformers,
        engine: LocalEngine,
        servers: Servers,
        raw: RawWriter,
        on_step: Callable[[str], None],
    ) -> None:
        self.sizes, self.transformers, self.engine, self.servers, self.raw = sizes, transformers, engine, servers, raw
        self._on_step = on_step
        problems = load_problems(BUNDLED / "train.jsonl")
        self._ids = [i for p in problems for i in engine.tokenizer.encode(completion_prompt(p, [p]) + "\n\n")]

    def run(self) -> list[Measurement]:
        sizes = self.sizes
        found = []
        for batch in sizes.batches:
            prompts = [self._prompt(sizes.decode_prompt, i * sizes.decode_prompt) for i in range(batch)]
            name = f"decode, {batch} request{'s' * (batch > 1)}"
            found.append(self._rounds(Measurement(name, "tokens/s", DECODE_RATIOS), partial(self._decode, prompts)))
        prompt = self._prompt(sizes.prefill_tokens)
        prefill = Measurement(f"prefill, {len(prompt)} tokens", "tokens/s", (("local", "transformers"),))
        found.append(self._rounds(prefill, partial(self._prefill, prompt)))
        for n in sizes.handoff_tokens:
            prompt = self._prompt(n)
            self.engine.prefill_s(prompt)  # so that what is digested was written before
            hand_off = Measurement(f"hand-off, {n} tokens", "ms", HAND_OFF_RATIOS)
            found.append(self._rounds(hand_off, partial(self._hand_off, prompt)))
        return found

    def _prompt(self, n_tokens: int, start: int = 0) -> Prompt:
        """Token ids of the bundled questions, of any length."""
        return tuple(islice(cycle(self._ids), start, start + n_tokens))

    def _rounds(self, measurement: Measurement, one_round: Callable[[Measurement], None]) -> Measurement:
        for i in range(self.sizes.rounds + 1):
            self._on_step(measurement.name)
            one_round(Measurement("warm-up", "", ()) if i == 0 else measurement)
        return measurement

    def _decode(self, prompts: Sequence[Prompt], m: Measurement) -> None:
        n_tokens = self.sizes.decode_tokens
        m.add("transformers", decode_rate(self.transformers.decode(prompts, n_tokens)))
        m.add("local decode", decode_rate(self.engine.decode(prompts, n_tokens)))
        m.add("PD", decode_rate(self.servers.decode_pair(prompts, n_tokens)))

    def _prefill(self, prompt: Prompt, m: Measurement) -> None:
        m.add("transformers", len(prompt) / self.transformers.prefill_s(prompt))
        m.add("local", len(prompt) / self.engine.prefill_s(prompt))

    def _hand_off(self, prompt: Prompt, m: Measurement) -> None:
        """``hand-off``: from the end of the prompt's last forward to the commit (digests, tail writes, check).

        Writes, and check with commit, are as the prefill node measures them; its digest pass, which no node reports, is
        the same code over as many bytes of the same layout here.
        """
        n = len(prompt)
        nbytes = sum(self.engine.arena.layout.live_nbytes(n).values())
        pd = self.servers.hand_off(prompt, nbytes)
        m.add("TTFT PD", 1e3 * pd.ttft_s)
        m.add("TTFT local", 1e3 * self.servers.ttft_local_s(prompt))
        at_prefill_s, at_decode_s = self.engine.digest_s(n), self.engine.digest_s(n)
        m.add("hand-off", 1e3 * (at_prefill_s + pd.transfer_s + pd.commit_s))
        m.add("raw write", 1e3 * median(self.raw.write_s(nbytes) for _ in range(RAW_WRITES_A_ROUND)))
        m.add("digests", 1e3 * (at_prefill_s + at_decode_s))
        m.add("of it: writes", 1e3 * pd.transfer_s)
        m.add("of it: check and commit", 1e3 * pd.commit_s)


def run(args: argparse.Namespace, console: Console) -> int:
    sizes = sizes_of(args)
    steps = (len(sizes.batches) + 1 + len(sizes.handoff_tokens)) * (sizes.rounds + 1)
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        engine = LocalEngine(args.model, threads=args.threads)
        stack.callback(engine.close)
        layout = engine.arena.layout
        raw = RawWriter(max(sum(layout.live_nbytes(n).values()) for n in sizes.handoff_tokens))
        stack.callback(raw.close)
        servers = stack.enter_context(running_servers(args.model, args.threads))
        reference = Transformers(args.model)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=steps, completed=-1)

            def on_step(name: str) -> None:
                progress.update(bar, advance=1, description=name)

            bench = Bench(sizes, reference, engine, servers, raw, on_step)
            measurements = bench.run()
            progress.update(bar, advance=1)
        setting = setting_of(args, bench, load_before)
    print_table(console, measurements)
    console.print(
        f"threads of one operation, on every side: {args.threads}; rounds: {sizes.rounds}; CPUs: {setting['cpus']}; "
        f"load average: {setting['load_average_before']:.1f} -> {setting['load_average_after']:.1f}",
        highlight=False,
    )
    if args.output is not None:
        write_json(args.output, setting, measurements)
    return 0 if args.quick else _gate(measurements, console)


def setting_of(args: argparse.Namespace, bench: Bench, load_before: float) -> dict[str, Any]:
    """What a reader must know to compare these numbers with others."""
    return {
        "model": args.model.resolve().name,
        "quick": args.quick,
        "threads": args.threads,
        "rounds": bench.sizes.rounds,
        "decode_tokens": bench.sizes.decode_tokens,
        "decode_prompt_tokens": bench.sizes.decode_prompt,
        "dtype": "float32",
        "deterministic": True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "transformers_kernels": bench.transformers.kernels,
        "mooncake": bench.raw.version,
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
    with StopSignals():
        try:
            return run(args, console)
        except StopRequested as stopped:
            print(f"bench: stopped by {stopped}", file=sys.stderr)
        except (BenchFailed, ClusterFailed) as error:
            print(f"bench: {error}", file=sys.stderr)
        return 2
