"""One run of a plan over started nodes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from cluster import ClusterFailed, Node, Resources, nothing_left
from cluster.asking import Outcome, Question, ask
from cluster.oracle import OracleCluster, oracle_cluster
from hostile.http_clients import GROWTH
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from soaking.chaos import disturb
from soaking.judge import judge
from soaking.plan import HOSTILE, Episode, Kind, Plan, Room
from soaking.report import Finding, Report

START_S = 120.0
"""For a node to start and to be ready, on a busy machine."""
SETTLE_S = 40.0
"""After the last client of an episode: until everything is free on both nodes. Above the longest deadline that ends a
room of a dead peer.
"""
PREFIX_COUNTS = {
    "tokens_looked_up": "pd_prefix_prompt_tokens_total",
    "tokens_reused": "pd_prefix_reused_tokens_total",
    "bytes_held": "pd_prefix_held_bytes_total",
    "evictions": "pd_prefix_evicted_total",
    "damaged": "pd_prefix_damaged_total",
}
"""Counters of the nodes' caches, by their names in the report."""
EXECUTOR_THREADS = 12
"""So many threads a node's pools for blocking calls (verify, fence, tokenize ...) may have made, and keep."""
WARM_UP = Question("/v1/completions", {"prompt": list(range(10, 80)), "max_tokens": 3, "n": 4, "temperature": 0})
"""Asked of every new life before its resources are counted."""


class Soak:
    """One run of a plan over started nodes."""

    def __init__(self, plan: Plan, nodes: OracleCluster, report: Report, client_timeout_s: float) -> None:
        self._plan, self._nodes, self._report = plan, nodes, report
        self._client_timeout_s = client_timeout_s
        self._expected: dict[int, asyncio.Task[Outcome]] = {}
        self._baselines: dict[tuple[str, int], Resources] = {}
        """What each life of a node had at its start."""
        self._prefix: dict[tuple[str, int, str], float] = {}
        """What the counters of each life's cache were at the last look."""

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
        if event.kind in HOSTILE:
            await self._forget(episode)
        for room, outcome in zip(episode.rooms, outcomes, strict=True):
            question = self._plan.questions[room.question]
            self._report.count(event, outcome)
            self._report.n_answered_tokens += sum(len(choice.tokens) for choice in outcome.choices.values())
            if (wrong := judge(question, outcome, await self._right_answer(room.question), event)) is not None:
                self._find(episode, room.number, f"{wrong}; asked {question.shown}")

    async def _client(self, room: Room) -> Outcome:
        await asyncio.sleep(room.start_s)
        question = self._plan.questions[room.question]
        return await ask(
            self._nodes.decode.url,
            question,
            stream=room.stream,
            leave_s=room.abort_s,
            timeout_s=self._client_timeout_s,
        )

    def _right_answer(self, number: int) -> asyncio.Task[Outcome]:
        """What one process answers. Asked once."""
        if number not in self._expected:
            self._expected[number] = asyncio.create_task(self._nodes.right_answer(self._plan.questions[number]))
        return self._expected[number]

    def _find(self, episode: Episode | None, room: int | None, what: str) -> None:
        number, event = (-1, "start") if episode is None else (episode.number, str(episode.event))
        self._report.findings.append(Finding(number, event, room, what))

    # --- between episodes ---------------------------------------------------------------------------------------------

    async def _heal(self, episode: Episode | None) -> None:
        """Waits until the nodes serve again and hold nothing, and compares what the system has given them."""
        for node in self._nodes.subjects:
            node.arm()
            if not node.running:
                self._find(episode, None, f"{node.name} ended by itself; see {node.log}")
                node.start()
        await self._nodes.serve(START_S)
        await self._settle(episode)
        new = [node for node in self._nodes.subjects if (node.name, node.lives) not in self._baselines]
        if new:
            await warm_up(self._nodes.prefills, self._ask_warm_up)
            await self._settle(episode)
            self._baselines |= {(node.name, node.lives): node.resources() for node in new}
        await self._find_left(episode, self._grown)
        self._count_prefixes(episode)
        for node in self._nodes.subjects:
            self._report.lives[node.name] = node.lives
            shown = {"start": self._baseline(node), "now": node.resources()}
            self._report.resources[node.name] = {name: asdict(resources) for name, resources in shown.items()}

    async def _settle(self, episode: Episode | None) -> None:
        seconds = await self._find_left(episode, lambda: [f"leak: {what}" for what in self._nodes.held()])
        self._report.longest_settle_s = max(self._report.longest_settle_s, seconds)

    async def _ask_warm_up(self) -> None:
        await ask(self._nodes.decode.url, WARM_UP, timeout_s=self._client_timeout_s)

    async def _forget(self, episode: Episode) -> None:
        """Waits until what hostile clients have sent is gone from every node's memory, and what it has leaked since its
        start with it: small leaks add up.
        """

        def kept() -> list[str]:
            nodes = self._nodes.subjects
            return [what for node in nodes for what in fatter(self._baseline(node), node.resources(), node.name)]

        await self._find_left(episode, kept)

    async def _find_left(self, episode: Episode | None, look: Callable[[], list[str]]) -> float:
        """Waits until ``look`` finds nothing; what it still finds after a while is a finding. The seconds it took."""
        left, seconds = await nothing_left(look, SETTLE_S)
        for what in left:
            self._find(episode, None, f"{what}, {seconds:.0f} s after the last client")
        return seconds

    def _grown(self) -> list[str]:
        return [
            what for node in self._nodes.subjects for what in grown(self._baseline(node), node.resources(), node.name)
        ]

    def _count_prefixes(self, episode: Episode | None) -> None:
        """Adds what the caches have done since the last look. Counters begin again with a life, or with a peer."""
        for node in self._nodes.subjects:
            for what, name in PREFIX_COUNTS.items():
                now, before = sum(node.samples(name).values()), self._prefix.get((node.name, node.lives, what), 0.0)
                new = int(now - before if now >= before else now)
                self._prefix[node.name, node.lives, what] = now
                self._report.prefix[what] = self._report.prefix.get(what, 0) + new
                if what == "damaged" and new:
                    self._find(episode, None, f"{node.name} found {new} damaged pages or snapshots in its cache")

    def _baseline(self, node: Node) -> Resources:
        return self._baselines[node.name, node.lives]


def grown(start: Resources, now: Resources, name: str) -> list[str]:
    """What a process has more of than at its start, in words."""
    left = []
    for what in ("fds", "sockets"):
        if getattr(now, what) > getattr(start, what):
            left.append(f"leak: {name} has {getattr(now, what)} {what}, {getattr(start, what)} at its start")
    if now.threads > start.threads + EXECUTOR_THREADS:
        left.append(f"leak: {name} has {now.threads} threads, {start.threads} at its start")
    return left


def fatter(start: Resources, now: Resources, name: str) -> list[str]:
    """What a process keeps of the memory that it needed for a while, in words."""
    if now.rss_mib <= GROWTH * start.rss_mib:
        return []
    return [f"leak: {name} has {now.rss_mib:.0f} MiB, {start.rss_mib:.0f} at its start"]


async def warm_up(prefills: Sequence[Node], ask_once: Callable[[], Awaitable[object]]) -> None:
    """Asks until every prefill node has sent a prompt's state, so that its connections count among those of its start.

    The decode node chooses by load: on a slow machine one of them may take all of the first prompts.
    Raises :class:`cluster.ClusterFailed`.
    """

    def committed() -> list[float]:
        return [node.samples("pd_phase_seconds_count").get(("commit",), 0.0) for node in prefills]

    before, deadline = await asyncio.to_thread(committed), time.monotonic() + START_S
    while True:
        now = await asyncio.to_thread(committed)
        left = [node.name for node, n, m in zip(prefills, before, now, strict=True) if m == n]
        if not left:
            return
        if time.monotonic() > deadline:
            raise ClusterFailed(f"the decode node has given no prompt to {', '.join(left)} in {START_S:g} s")
        await asyncio.gather(ask_once(), ask_once())


def logged_errors(logs: list[Path]) -> list[str]:
    """Lines in which a node says that something went wrong inside it."""
    return [
        f"{path.name}:{number}: {line}"
        for path in logs
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if " ERROR " in line or line.startswith("Traceback")
    ]


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

    Raises :class:`ClusterFailed` if the servers cannot be run.
    """
    report, started = Report(plan), time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    relayed = any(episode.event.kind is Kind.LATE_MESSAGES for episode in plan.episodes)
    options = (prefill_options, decode_options)
    async with oracle_cluster(plan.seed, plan.prefill_nodes, logs, *options, relayed=relayed) as nodes:
        with Progress(*columns, console=console) as progress:
            await Soak(plan, nodes, report, client_timeout_s).run(progress, longest_s)
    report.elapsed_s = round(time.monotonic() - started, 1)
    for line in logged_errors([node.log for node in nodes.subjects]):
        report.findings.append(Finding(-1, "logs", None, line))
    return report
