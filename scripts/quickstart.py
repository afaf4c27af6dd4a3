"""The part of scripts/quickstart after the set-up: a prefill and a decode process, one question, one line of proof.

Exit codes: 0 ended by Ctrl-C, SIGTERM or --once; 1 a process died, was not ready in time or gave no answer;
2 a port is taken, or an option is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from evaluation.questions import BUNDLED, STOP, Problem, completion_prompt, load_problems, pick_shots
from process_pair import Pair, PairFailed, Process, StopRequested, StopSignals, require_free_port
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LOGS = ROOT / ".run"
HOST = "127.0.0.1"
N_SHOTS = 4
MODEL = ROOT / "server" / "assets" / "tiny-dsv4"
DRAIN_S = 3.0
"""Ctrl-C lets an answer go on for this long: somebody waits for the prompt of the shell."""
DEFAULT_SPEC_TOKENS = 3
POLL_S = 0.2
ANSWER_TIMEOUT_S = 120.0
EXAMPLE = "Question: Tom has 8 bags with 8 books each. How many books does Tom have?\nAnswer:"
"""Of the kind that the bundled model was trained for. It answers `` 8 * 8 = 64 #### 64``."""


@dataclass(frozen=True)
class Proof:
    """What one answered question shows: who computed the prompt, in which room, and what moved for it."""

    prefill: str
    room: str
    nbytes: dict[str, int]
    ttft_s: float
    prompt_tokens: int
    accept_length: float | None = None

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {n:,}" for name, n in self.nbytes.items() if n)
        return (
            f"proof: prefill {self.prefill} computed the {self.prompt_tokens} prompt tokens (room {self.room}), "
            f"Mooncake moved {sum(self.nbytes.values()):,} bytes ({parts}), TTFT {self.ttft_s * 1e3:.0f} ms"
            + (f", {self.accept_length:.2f} tokens a decode step" if self.accept_length else "")
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


def processes(args: argparse.Namespace) -> tuple[Process, Process]:
    """The two command lines, each with a log file of its own."""
    model = ["--drain-timeout", f"{DRAIN_S:g}", *(["--model", str(args.model)] if args.model else [])]
    prefill = [str(BIN / "launch_prefill"), "--host", HOST, "--port", str(args.prefill_port)]
    prefill += ["--bootstrap-port", str(args.bootstrap_port), *model]
    decode = [str(BIN / "launch_decode"), "--host", HOST, "--port", str(args.decode_port)]
    decode += ["--prefill", f"{HOST}:{args.bootstrap_port}", *model]
    spec_tokens = args.spec_tokens if args.spec_tokens is not None else default_spec_tokens(args.model or MODEL)
    decode += ["--spec-tokens", str(spec_tokens)]
    return (
        Process("prefill", prefill, LOGS / f"prefill-{args.prefill_port}.log"),
        Process("decode", decode, LOGS / f"decode-{args.decode_port}.log"),
    )


def default_spec_tokens(model: Path) -> int:
    """Three draft tokens a step where the checkpoint says that it has a NextN layer."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0  # the launchers will say what is wrong with the directory
    return DEFAULT_SPEC_TOKENS if config.get("num_nextn_predict_layers") else 0


def wait_ready(pair: Pair, client: httpx.Client, prefill_url: str, decode_url: str, timeout_s: float) -> None:
    """Returns once the prefill process is alive and the decode process has proved a transfer from it."""
    deadline = time.monotonic() + timeout_s
    waiting = [f"{prefill_url}/health", f"{decode_url}/ready"]
    reason = "no answer yet"
    while waiting:
        pair.check()
        try:
            response = client.get(waiting[0], timeout=5.0)
            if response.is_success:
                waiting.pop(0)
                continue
            reason = f"HTTP {response.status_code} {response.text[:200]}"
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise PairFailed(f"{waiting[0]} was not ready after {timeout_s:g} s: {reason}")
        time.sleep(POLL_S)


def ask(client: httpx.Client, decode_url: str, prompt: str) -> Proof:
    """Streams the answer to standard output as it comes. Raises :class:`PairFailed` for anything but a whole answer."""
    before = transfer_bytes(client, decode_url)
    body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "stop": list(STOP), "stream": True}
    body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    ttft_s = None
    usage: dict[str, Any] = {}
    pd: dict[str, str] = {}
    with client.stream("POST", f"{decode_url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S) as response:
        if not response.is_success:
            raise PairFailed(f"the question was refused: HTTP {response.status_code} {response.read().decode()[:500]}")
        for event in events(response):
            usage, pd = event.get("usage") or usage, event.get("pd") or pd
            for choice in event["choices"]:
                if choice["text"]:
                    ttft_s = ttft_s or time.perf_counter() - started
                    print(choice["text"], end="", flush=True)
    print()
    after = transfer_bytes(client, decode_url)
    prefill = pd.get("prefill", response.headers.get("x-pd-prefill"))
    nbytes = {name: n - before.get(name, 0) for name, n in after.items()}
    if prefill in (None, "local") or not any(nbytes.values()):
        raise PairFailed(f"no proof: the prefill node is {prefill}, bytes moved by component: {nbytes}")
    drafts = usage.get("completion_tokens_details")
    return Proof(
        prefill=prefill,
        room=pd.get("room", response.headers.get("x-pd-room", "(not named)")),
        nbytes=nbytes,
        ttft_s=ttft_s if ttft_s is not None else time.perf_counter() - started,
        prompt_tokens=usage.get("prompt_tokens", 0),
        accept_length=1 + drafts["accepted_prediction_tokens"] / drafts["draft_steps"] if drafts else None,
    )


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a streamed answer. Raises :class:`PairFailed` for an error event or an early end."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise PairFailed(f"the answer ended in an error: {event['error']}")
        yield event
    raise PairFailed("the answer ended early")


def transfer_bytes(client: httpx.Client, url: str) -> dict[str, int]:
    """Bytes moved so far by component, from ``pd_transfer_bytes_total``."""
    text = client.get(f"{url}/metrics", timeout=5.0).raise_for_status().text
    return {
        sample.labels["component"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "pd_transfer_bytes_total"
    }


def far_problem() -> tuple[Problem, str]:
    """A bundled question whose fact lies outside the sliding window, and its few-shot prompt."""
    problems = load_problems(BUNDLED / "test.jsonl")
    problem = next((p for p in problems if p.kind == "far"), problems[0])
    return problem, completion_prompt(problem, pick_shots(problem, load_problems(BUNDLED / "train.jsonl"), N_SHOTS, 0))


def serve(args: argparse.Namespace, pair: Pair) -> None:
    """Starts the pair, asks, prints the proof, and (but for --once) stays until a process dies or a signal comes."""
    prefill_url, decode_url = f"http://{HOST}:{args.prefill_port}", f"http://{HOST}:{args.decode_port}"
    pair.start()
    for process in pair.processes:
        print(f"{process.name}: pid {process.pid}, log {process.log}")
    started = time.monotonic()
    with httpx.Client(trust_env=False) as client:
        try:
            wait_ready(pair, client, prefill_url, decode_url, args.ready_timeout)
            print(f"both ready after {time.monotonic() - started:.1f} s\n")
            problem, prompt = far_problem()
            print(f"question: {problem.question}\nanswer:", end="", flush=True)
            proof = ask(client, decode_url, prompt)
        except httpx.HTTPError as error:
            pair.check_within(1.0)
            raise PairFailed(f"{decode_url}: {str(error) or type(error).__name__}") from error
    print(f"expected: {problem.answer}\n{proof}\n")
    if args.once:
        return
    shown = json.dumps({"prompt": EXAMPLE, "max_tokens": 32, "temperature": 0, "stop": list(STOP)})
    print("serving until Ctrl-C; try:")
    print(f"  curl {decode_url}/v1/completions -H 'content-type: application/json' -d '{shown}'")
    pair.wait()


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
    except PairFailed as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    LOGS.mkdir(exist_ok=True)
    with StopSignals() as signals:
        pair = Pair(processes(args), signals)
        try:
            serve(args, pair)
        except StopRequested as stopped:
            print(f"\n{stopped}: stopping both")
        except PairFailed as error:
            print(f"\nquickstart: {error}", file=sys.stderr)
            return 1
        finally:
            pair.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
