"""Few-shot gsm8k against any OpenAI-compatible endpoint: accuracy, speed, and equality with a second endpoint.

Exit codes: 0 every gate holds; 1 a gate does not (accuracy, equality, prefill) or a question ended in an error;
2 the run could not be done (arguments, data, an endpoint that is unreachable or died).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .client import Answer, Endpoint, ServerDied, ask_all, first_model
from .questions import (
    BUNDLED,
    N_SHOTS,
    SEED,
    STOP,
    DataError,
    Problem,
    chat_messages,
    completion_prompt,
    load_problems,
    pick_shots,
)
from .report import Run, as_json, differences, print_differences, print_run

SHOWN_ERRORS = 5


T = TypeVar("T", int, float)


def checked(read: Callable[[str], T], holds: Callable[[T], bool], rule: str) -> Callable[[str], T]:
    """A type for argparse: numbers that keep a rule, which a refusal tells."""

    def value_of(text: str) -> T:
        if not holds(value := read(text)):
            raise argparse.ArgumentTypeError(f"must {rule}, got {value:g}")
        return value

    value_of.__name__ = read.__name__
    return value_of


POSITIVE = checked(int, lambda value: value >= 1, "be at least 1")
NOT_NEGATIVE = checked(int, lambda value: value >= 0, "not be negative")
POSITIVE_FLOAT = checked(float, lambda value: value > 0, "be above 0")
SHARE = checked(float, lambda value: 0 <= value <= 1, "be from 0 to 1")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Few-shot gsm8k against any OpenAI-compatible endpoint.",
        epilog="Exit codes: 0 every gate holds, 1 a gate does not or a question failed, 2 the run could not be done.",
        formatter_class=_Help,
    )
    where = parser.add_argument_group("endpoint")
    where.add_argument("--base-url", default="http://127.0.0.1:30001", help="server, with or without /v1")
    where.add_argument("--model", help="model name to send (default: the endpoint's first)")
    where.add_argument("--api", choices=("completions", "chat"), default="completions", help="which route to ask")
    where.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds a bearer token")
    where.add_argument(
        "--timeout", type=POSITIVE_FLOAT, default=120.0, metavar="S", help="deadline of one request, seconds"
    )
    data = parser.add_argument_group("questions")
    data.add_argument("--data", type=Path, default=BUNDLED / "test.jsonl", help="jsonl with 'question' and 'answer'")
    data.add_argument(
        "--shots-data",
        type=Path,
        help="jsonl to draw worked examples from, never the question itself "
        "(default: the bundled train set for the bundled data, else --data itself)",
    )
    data.add_argument("--num-shots", type=NOT_NEGATIVE, default=N_SHOTS, help="worked examples before each question")
    data.add_argument(
        "--num-questions", type=NOT_NEGATIVE, default=200, help="first rows of the data to ask, 0 for all"
    )
    data.add_argument("--max-tokens", type=POSITIVE, default=256, help="limit of one answer, tokens")
    data.add_argument("--concurrency", type=POSITIVE, default=8, help="requests in flight")
    data.add_argument("--seed", type=int, default=SEED, help="which worked examples a question gets")
    gates = parser.add_argument_group("gates (they set the exit code)")
    gates.add_argument("--min-accuracy", type=SHARE, metavar="SHARE", help="least accuracy, 0 to 1")
    gates.add_argument(
        "--baseline-url", metavar="URL", help="second endpoint for the same questions, compared text by text"
    )
    gates.add_argument("--require-equal", action="store_true", help="every answer must equal the baseline's")
    gates.add_argument(
        "--require-prefill",
        action="store_true",
        help="every answer must name a prefill node in the header x-pd-prefill, and not 'local'",
    )
    report = parser.add_argument_group("report")
    report.add_argument("--output", type=Path, metavar="FILE", help="write everything, with every answer, as JSON")
    args = parser.parse_args(argv)
    if args.require_equal and not args.baseline_url:
        parser.error("--require-equal needs --baseline-url")
    if args.shots_data is None:
        bundled = args.data.resolve() == (BUNDLED / "test.jsonl").resolve()
        args.shots_data = BUNDLED / "train.jsonl" if bundled else args.data
    return args


async def run_endpoint(
    endpoint: Endpoint,
    problems: list[Problem],
    prompts: list[str | list[dict[str, str]]],
    concurrency: int,
    console: Console,
) -> Run:
    """Asks one endpoint everything. Raises :class:`ServerDied`."""
    limits = httpx.Limits(max_connections=concurrency + 1)
    async with httpx.AsyncClient(timeout=endpoint.timeout_s, limits=limits, trust_env=False) as client:
        if endpoint.model is None:
            endpoint = replace(endpoint, model=await first_model(client, endpoint))
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]}"),
            console=console,
        ) as progress:
            bar = progress.add_task(endpoint.root, total=len(prompts), failed="")
            n_failed = 0

            def on_answer(index: int, answer: Answer) -> None:
                nonlocal n_failed
                if answer.error is not None:
                    n_failed += 1
                    if n_failed <= SHOWN_ERRORS:
                        progress.console.print(f"question {index}: {answer.error}", markup=False, highlight=False)
                progress.update(bar, advance=1, failed=f"{n_failed} errors" if n_failed else "")

            started = time.perf_counter()
            answers = await ask_all(client, endpoint, prompts, concurrency, on_answer)
            wall_s = time.perf_counter() - started
    return Run(endpoint.root, endpoint.model or "", problems, answers, wall_s)


def failed_gates(args: argparse.Namespace, run: Run, baseline: Run | None) -> list[str]:
    """One sentence for each gate that does not hold."""
    failed = []
    for name, each in (("the endpoint", run), ("the baseline", baseline)):
        if each is not None and each.errors:
            problem, error = each.errors[0]
            failed.append(f"{len(each.errors)} questions failed on {name}; first, question {problem.index}: {error}")
    if args.min_accuracy is not None and run.accuracy < args.min_accuracy:
        failed.append(f"accuracy {run.accuracy:.4f} is below --min-accuracy {args.min_accuracy:g}")
    if args.require_equal and baseline is not None and (found := differences(run, baseline)):
        failed.append(f"{len(found)} of {len(run.problems)} answers differ from the baseline's")
    if args.require_prefill:
        without = sum(count for who, count in run.served_by.items() if who in ("local", "(no header)"))
        if without or not run.served_by:
            failed.append(f"{without} answers were not served by a prefill node: {dict(run.served_by)}")
    return failed


async def evaluate(args: argparse.Namespace, console: Console) -> int:
    """The whole run; returns the exit code. Raises :class:`DataError` or :class:`ServerDied` when it cannot be done."""
    problems = load_problems(args.data)[: args.num_questions or None]
    pool = load_problems(args.shots_data) if args.num_shots else []
    as_prompt = completion_prompt if args.api == "completions" else chat_messages
    prompts = [as_prompt(problem, pick_shots(problem, pool, args.num_shots, args.seed)) for problem in problems]
    endpoint = Endpoint(
        base_url=args.base_url,
        api=args.api,
        model=args.model,
        max_tokens=args.max_tokens,
        stop=STOP,
        timeout_s=args.timeout,
        api_key=os.environ.get(args.api_key_env) if args.api_key_env else None,
    )
    run = await run_endpoint(endpoint, problems, prompts, args.concurrency, console)
    baseline = None
    if args.baseline_url:
        other = replace(endpoint, base_url=args.baseline_url)
        baseline = await run_endpoint(other, problems, prompts, args.concurrency, console)

    figures = {"run": as_json(run)}
    print_run(console, "endpoint", figures["run"])
    if baseline is not None:
        found = differences(run, baseline)
        figures["baseline"] = as_json(baseline)
        figures["comparison"] = {
            "equal": len(problems) - len(found),
            "different": [{"index": d.problem.index, "position": d.position} for d in found],
        }
        print_run(console, "baseline", figures["baseline"])
        print_differences(console, found, len(problems))
    failed = failed_gates(args, run, baseline)
    if args.output is not None:
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        document = {"arguments": arguments, **figures, "failed_gates": failed}
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for sentence in failed:
        console.print(f"FAILED: {sentence}", style="bold red", markup=False, highlight=False)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    console = Console(stderr=True, soft_wrap=True)
    args = parse_args(argv)
    try:
        return asyncio.run(evaluate(args, console))
    except (DataError, ServerDied) as error:
        console.print(f"gsm8k: {error}", style="bold red", markup=False, highlight=False)
        return 2
    except OSError as error:
        console.print(f"gsm8k: cannot write the report: {error}", style="bold red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
