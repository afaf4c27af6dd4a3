"""A chaos soak: random clients against real processes that are killed, frozen, restarted and shouted at meanwhile.

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
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from process_pair import PairFailed, StopRequested, StopSignals
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from soak_chaos import disturb
from soak_client import Outcome, ask, judge
from soak_nodes import Field, Node, Resources, SoakFailed, running, until
from soak_plan import ROOMS_PER_EPISODE, Episode, Event, Plan, Question, Room, make_plan

START_S = 120.0
"""For a node to start and to be ready, on a busy machine."""
SETTLE_S = 40.0
"""After the last client of an episode: until everything is free on both nodes. Above the longest deadline that ends a
room of a dead peer.
"""
ORACLE_TIMEOUT_S = 300.0
EXECUTOR_THREADS = 12
"""So many threads a node's pools for blocking calls (verify, fence, tokenize ...) may have made, and keep."""
WARM_UP = Question("/v1/completions", {"prompt": list(range(10, 80)), "max_tokens": 3, "n": 4, "temperature": 0})
"""Asked of every new life before its resources are counted."""


@dataclass(frozen=True)
class Finding:
    """Something that must not happen: in which episode, beside what, to which room (None: not one room's fault)."""

    episode: int
    event: str
    room: int | None
    what: str


@dataclass
class Report:
    """What a run has seen so far."""

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    ends_by_event: dict[str, Counter[str]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    lives: dict[str, int] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    n_answered_tokens: int = 0
    longest_s: float = 0.0
    longest_settle_s: float = 0.0
    elapsed_s: float = 0.0

    def count(self, event: Event, outcome: Outcome) -> None:
        self.ends[outcome.end] += 1
        self.ends_by_event.setdefault(event.kind, Counter())[outcome.end] += 1
        if outcome.error:
            self.codes[f"{outcome.status} {outcome.error.get('code')}"] += 1
        self.longest_s = max(self.longest_s, outcome.seconds)

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name not in ("plan", "findings")}
        plan: dict[str, Any] = {
            "seed": self.plan.seed,
            "rooms": self.plan.n_rooms,
            "rooms_played": self.ends.total(),
            "prefill_nodes": self.plan.prefill_nodes,
        }
        plan |= {"episodes": len(self.plan.episodes), "plan": self.plan.digest}
        return plan | fields | {"findings": [asdict(finding) for finding in self.findings]}


class Soak:
    """One run of a plan over started nodes. ``oracle`` is the URL of the one process that computes alone."""

    def __init__(self, plan: Plan, nodes: Field, oracle: str, report: Report, client_timeout_s: float) -> None:
        self._plan, self._nodes, self._oracle, self._report = plan, nodes, oracle, report
        self._client_timeout_s = client_timeout_s
        self._expected: dict[int, asyncio.Task[Outcome]] = {}

    async def run(self, progress: Progress, longest_s: float) -> None:
        """Plays the episodes in order; begins none after ``longest_s``."""
        await self._heal(None)
        bar, started = progress.add_task("rooms", total=self._plan.n_rooms), time.monotonic()
        for episode in self._plan.episodes:
            if time.monotonic() - started > longest_s:
                return
            await self._play(episode)
            progress.update(bar, advance=len(episode.rooms), description=self._so_far())

    def _so_far(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in self._report.ends.most_common())
        return f"{ends}, {len(self._report.findings)} findings"

    async def _play(self, episode: Episode) -> None:
        event = episode.event
        clients = [asyncio.create_task(self._client(room)) for room in episode.rooms]
        for room in episode.rooms:
            self._right_answer(room.question)  # so that one process computes while the pair does
        await asyncio.sleep(event.at_s)
        if (wrong := await disturb(event, self._nodes)) is not None:
            self._find(episode, None, wrong)
        outcomes = await asyncio.gather(*clients)
        await self._heal(episode)
        for room, outcome in zip(episode.rooms, outcomes, strict=True):
            question = self._plan.questions[room.question]
            self._report.count(event, outcome)
            self._report.n_answered_tokens += sum(len(choice.tokens) for choice in outcome.choices.values())
            if (wrong := judge(question, outcome, await self._right_answer(room.question), event)) is not None:
                self._find(episode, room.number, f"{wrong}; asked {_shown(question)}")

    async def _client(self, room: Room) -> Outcome:
        await asyncio.sleep(room.start_s)
        question = self._plan.questions[room.question]
        return await ask(self._nodes.decode.url, question, room, timeout_s=self._client_timeout_s)

    def _right_answer(self, number: int) -> asyncio.Task[Outcome]:
        """What one process answers. Asked once."""
        if number not in self._expected:
            self._expected[number] = asyncio.create_task(self._ask_oracle(self._plan.questions[number]))
        return self._expected[number]

    async def _ask_oracle(self, question: Question) -> Outcome:
        outcome = await ask(self._oracle, question, timeout_s=ORACLE_TIMEOUT_S)
        if outcome.status != question.status:
            raise SoakFailed(f"the process that computes alone said {outcome} to {_shown(question)}")
        return outcome

    def _find(self, episode: Episode | None, room: int | None, what: str) -> None:
        number, event = (-1, "start") if episode is None else (episode.number, str(episode.event))
        self._report.findings.append(Finding(number, event, room, what))

    # --- between episodes ---------------------------------------------------------------------------------------------

    async def _heal(self, episode: Episode | None) -> None:
        """Waits until the nodes serve again and hold nothing, and compares what the system has given them."""
        for node in self._nodes.nodes:
            node.arm()
            if not node.running:
                self._find(episode, None, f"{node.name} ended by itself; see {node.logs[-1]}")
                node.start()
        left, _ = await until(self._not_ready, START_S)
        if left:
            self._find(episode, None, f"not ready again after {START_S:g} s: {'; '.join(left)}")
            raise SoakFailed(f"the nodes do not serve again: {'; '.join(left)}")
        await self._settle(episode)
        new = [node for node in self._nodes.nodes if node.baseline is None]
        if new:
            await ask(self._nodes.decode.url, WARM_UP, timeout_s=self._client_timeout_s)
            await self._settle(episode)
            for node in new:
                node.baseline = node.resources()
        left, seconds = await until(self._grown, SETTLE_S)
        for what in left:
            self._find(episode, None, f"{what}, {seconds:.0f} s after the last client")
        for node in self._nodes.nodes:
            self._report.lives[node.name] = node.lives
            shown = {"start": node.baseline, "now": node.resources()}
            self._report.resources[node.name] = {name: asdict(r) for name, r in shown.items() if r is not None}

    async def _not_ready(self) -> list[str]:
        left = []
        for node in self._nodes.prefills:
            health = await node.get("/health")
            if not health.is_success:
                left.append(f"{node.name}: {health.text}")
        peers = (await self._nodes.decode.info())["peers"]
        left += [
            f"{peer['address']} is {peer['state']}: {peer['reason']}" for peer in peers if peer["state"] != "registered"
        ]
        ready = await self._nodes.decode.get("/ready")
        return left if ready.is_success else [*left, f"decode: {ready.text}"]

    async def _settle(self, episode: Episode | None) -> None:
        left, seconds = await until(self._held, SETTLE_S)
        self._report.longest_settle_s = max(self._report.longest_settle_s, seconds)
        for what in left:
            self._find(episode, None, f"leak: {what}, {seconds:.0f} s after the last client")

    async def _held(self) -> list[str]:
        return [what for node in self._nodes.nodes for what in await node.held()]

    async def _grown(self) -> list[str]:
        return [
            what
            for node in self._nodes.nodes
            if node.baseline
            for what in grown(node.baseline, node.resources(), node.name)
        ]


def grown(start: Resources, now: Resources, name: str) -> list[str]:
    """What a process has more of than at its start, in words."""
    left = []
    for what in ("fds", "sockets"):
        if getattr(now, what) > getattr(start, what):
            left.append(f"leak: {name} has {getattr(now, what)} {what}, {getattr(start, what)} at its start")
    if now.threads > start.threads + EXECUTOR_THREADS:
        left.append(f"leak: {name} has {now.threads} threads, {start.threads} at its start")
    return left


def logged_errors(logs: list[Path]) -> list[str]:
    """Lines in which a node says that something went wrong inside it."""
    return [
        f"{path.name}:{number}: {line}"
        for path in logs
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if " ERROR " in line or line.startswith("Traceback")
    ]


def _shown(question: Question) -> str:
    text = json.dumps(question.body)
    return f"{question.path} {text if len(text) < 400 else text[:400] + '...'}"


async def soak(
    plan: Plan,
    logs: Path,
    console: Console,
    client_timeout_s: float,
    *,
    longest_s: float = math.inf,
    prefill_options: tuple[str, ...] = (),
    decode_options: tuple[str, ...] = (),
) -> Report:
    """Plays ``plan``, or what of it can begin within ``longest_s``, against nodes with these further options.

    Raises :class:`SoakFailed` or :class:`process_pair.PairFailed` if the servers cannot be run.
    """
    report, started = Report(plan), time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    try:
        async with running(plan.seed, plan.prefill_nodes, logs, prefill_options, decode_options) as (nodes, oracle):
            left, _ = await until(lambda: _no_health(oracle), START_S)
            if left:
                raise SoakFailed(f"the process that computes alone does not start: {left}; see {oracle.logs[-1]}")
            with Progress(*columns, console=console) as progress:
                await Soak(plan, nodes, oracle.url, report, client_timeout_s).run(progress, longest_s)
    finally:
        report.elapsed_s = round(time.monotonic() - started, 1)
    for line in logged_errors([path for node in nodes.nodes for path in node.logs]):
        report.findings.append(Finding(-1, "logs", None, line))
    return report


async def _no_health(node: Node) -> str:
    node.check()
    health = await node.get("/health")
    return "" if health.is_success else health.text


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
    console = Console(stderr=True)
    plan = make_plan(args.seed, args.rooms, prefill_nodes=args.prefill_nodes, rooms_per_episode=args.rooms_per_episode)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with StopSignals():
            report = asyncio.run(soak(plan, logs, console, args.client_timeout, longest_s=60 * args.minutes))
    except (PairFailed, SoakFailed) as error:
        print(f"soak: {error}; logs in {logs}", file=sys.stderr)
        return 2
    except StopRequested:
        return 130
    if args.output:
        args.output.write_text(json.dumps(report.as_json(), indent=2), encoding="utf-8")
    print(summary(report))
    for finding in report.findings:
        print(
            f"soak: episode {finding.episode} ({finding.event}), room {finding.room}: {finding.what}", file=sys.stderr
        )
    if report.findings:
        print(f"soak: {len(report.findings)} findings; logs in {logs}", file=sys.stderr)
        return 1
    return 0


def summary(report: Report) -> str:
    """One paragraph."""
    plan, ends = report.plan, ", ".join(f"{count} {end}" for end, count in report.ends.most_common())
    return (
        f"seed {plan.seed} (plan {plan.digest}): {report.ends.total()} of {plan.n_rooms} rooms: {ends}; "
        f"{report.n_answered_tokens} tokens compared; the slowest client took {report.longest_s:.1f} s, the slowest "
        f"clean-up {report.longest_settle_s:.1f} s; lives {dict(report.lives)}; {len(report.findings)} findings; "
        f"{report.elapsed_s:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
