"""The part of scripts/quickstart after the set-up: a prefill and a decode process, one question, one line of proof.

Exit codes: 0 ended by Ctrl-C, SIGTERM or --once; 1 a process died, was not ready in time or gave no answer;
2 a port is taken, or an option is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from cluster import (
    HOST,
    LOGS,
    ROOT,
    Cluster,
    ClusterFailed,
    Node,
    PortTaken,
    StopRequested,
    StopSignals,
    require_free_port,
)
from evaluation.client import Answer, Endpoint, ServerDied, accept_length, ask
from evaluation.questions import STOP, Problem, bundled_questions

MODEL = ROOT / "server" / "assets" / "tiny-dsv4"
DRAIN_S = 3.0
"""Ctrl-C lets an answer go on for this long: somebody waits for the prompt of the shell."""
DEFAULT_SPEC_TOKENS = 3
POLL_S = 0.2
ANSWER_TIMEOUT_S = 120.0
EXAMPLE = r"""curl {url}/v1/completions -H 'Content-Type: application/json' \
  -d '{"prompt": "Question: Tom has 8 bags with 8 books each. How many books does Tom have?\nAnswer:",
       "max_tokens": 32, "temperature": 0, "stop": ["\n"]}'"""
"""The README's: of the kind that the bundled model was trained for. It answers `` 8 * 8 = 64 #### 64``."""


@dataclass(frozen=True)
class Proof:
    """What one answered question shows: who computed the prompt, in which room, and what moved for it."""

    answer: Answer
    nbytes: dict[str, int]

    def __str__(self) -> str:
        answer = self.answer
        parts = ", ".join(f"{name} {n:,}" for name, n in self.nbytes.items() if n)
        ttft_s = answer.total_s if answer.ttft_s is None else answer.ttft_s
        length = accept_length([answer])
        return (
            f"proof: prefill {answer.prefill} computed the {answer.prompt_tokens} prompt tokens (room {answer.room}), "
            f"Mooncake moved {sum(self.nbytes.values()):,} bytes ({parts}), TTFT {ttft_s * 1e3:.0f} ms"
            + (f", {length:.2f} tokens a decode step" if length else "")
        )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="scripts/quickstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prefill-port", type=int, default=30000, help="HTTP port of the prefill process (30000)")
    parser.add_argument("--decode-port", type=int, default=30001, help="HTTP port of the decode process (30001)")
    parser.add_argument("--bootstrap-port", type=int, default=8998, help="control port of the prefill process (8998)")
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--spec-tokens", type=int, help="draft tokens a step (3 if the checkpoint has a draft, else 0)")
    parser.add_argument("--ready-timeout", type=float, default=120.0, help="seconds both may take to start (120)")
    parser.add_argument("--once", action="store_true", help="end after the answer")
    args = parser.parse_args(argv)
    ports = {"--prefill-port": args.prefill_port, "--decode-port": args.decode_port}
    ports["--bootstrap-port"] = args.bootstrap_port
    for (one, port), (other, same) in itertools.combinations(ports.items(), 2):
        if port == same:
            parser.error(f"{one} and {other} are both {port}: give them different ports")
    return args


def make_nodes(args: argparse.Namespace) -> tuple[Node, Node]:
    """Prefill and decode, each with a log file of its own."""
    common = ["--drain-timeout", f"{DRAIN_S:g}", *(["--model", str(args.model)] if args.model else [])]
    log = LOGS / f"prefill-{args.prefill_port}.log"
    prefill = Node("prefill", log, *common, port=args.prefill_port, bootstrap_port=args.bootstrap_port)
    spec_tokens = args.spec_tokens if args.spec_tokens is not None else default_spec_tokens(args.model or MODEL)
    options = ["--prefill", prefill.address, "--spec-tokens", str(spec_tokens), *common]
    return prefill, Node("decode", LOGS / f"decode-{args.decode_port}.log", *options, port=args.decode_port)


def default_spec_tokens(model: Path) -> int:
    """Three draft tokens a step where the checkpoint says that it has a NextN layer."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0  # the launchers will say what is wrong with the directory
    return DEFAULT_SPEC_TOKENS if config.get("num_nextn_predict_layers") else 0


async def ask_aloud(url: str, prompt: str) -> Answer:
    """The answer, which is printed as it comes."""
    endpoint = Endpoint(url, "completions", None, 64, STOP, ANSWER_TIMEOUT_S)
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
        return await ask(client, endpoint, prompt, lambda text: print(text, end="", flush=True))


def prove(decode: Node, prompt: str) -> Proof:
    """Asks, and shows where the answer came from. Raises :class:`ClusterFailed` for anything but a whole answer."""
    before = decode.transfer_bytes()
    answer = asyncio.run(ask_aloud(decode.url, prompt))
    print()
    if answer.error is not None:
        raise ClusterFailed(f"the question was not answered: {answer.error}")
    nbytes = {name: n - before.get(name, 0) for name, n in decode.transfer_bytes().items()}
    if answer.prefill in (None, "local") or not any(nbytes.values()):
        raise ClusterFailed(f"no proof: the prefill node is {answer.prefill}, bytes moved by component: {nbytes}")
    return Proof(answer, nbytes)


def far_problem() -> tuple[Problem, str]:
    """A bundled question whose fact lies outside the sliding window, and its few-shot prompt."""
    return next((problem, prompt) for problem, prompt in bundled_questions() if problem.kind == "far")


def serve(args: argparse.Namespace, nodes: Cluster) -> None:
    """Starts the pair, asks, prints the proof, and (but for --once) stays until a process dies or a signal comes."""
    nodes.start()
    for node in nodes.nodes:
        print(f"{node.name}: pid {node.pid}, log {node.log}")
    started = time.monotonic()
    decode = nodes.nodes[-1]
    nodes.wait_ready(args.ready_timeout)
    print(f"both ready after {time.monotonic() - started:.1f} s\n")
    problem, prompt = far_problem()
    print(f"question: {problem.question}\nanswer:", end="", flush=True)
    try:
        proof = prove(decode, prompt)
    except (ClusterFailed, ServerDied, httpx.HTTPError) as error:
        nodes.check_for(1.0)
        raise ClusterFailed(f"{decode.url}: {str(error) or type(error).__name__}") from error
    print(f"expected: {problem.answer}\n{proof}\n")
    if args.once:
        return
    print("serving until Ctrl-C; try:")
    print(f"  {decode.url}/ in a browser")
    print(EXAMPLE.replace("{url}", decode.url))
    while True:
        nodes.check()
        time.sleep(POLL_S)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    try:
        for purpose, port in (
            ("prefill", args.prefill_port),
            ("decode", args.decode_port),
            ("bootstrap", args.bootstrap_port),
        ):
            require_free_port(HOST, port, purpose)
    except PortTaken as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    with StopSignals():
        nodes = Cluster(make_nodes(args))
        try:
            serve(args, nodes)
        except StopRequested as stopped:
            print(f"\n{stopped}: stopping both")
        except ClusterFailed as error:
            print(f"\nquickstart: {error}", file=sys.stderr)
            return 1
        finally:
            nodes.stop()
    return 0
