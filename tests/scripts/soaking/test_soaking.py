"""scripts/soak.py: its plan, its judgement, and runs against real processes, healthy and not."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from cluster import Node, Resources
from cluster.asking import Choice, End, Outcome, Question
from rich.console import Console
from soaking import run as soak
from soaking.judge import judge
from soaking.plan import DECK, HARMLESS, HOSTILE, Event, Kind, Plan, make_plan
from soaking.report import Report

QUESTION = Question("/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
EXPECTED = Outcome(End.ANSWERED, 200, choices={0: Choice("a b c", ["a", "b", "c"], "length")})
QUIET = Event(Kind.QUIET, "decode", 0.0, 0.0, 0)
KILL_P = Event(Kind.KILL, "prefill0", 0.0, 0.0, 0)
KILL_D = Event(Kind.KILL, "decode", 0.0, 0.0, 0)
BEGUN = {0: Choice("a b", ["a", "b"])}
WRONG = {0: Choice("a x", ["a", "x"])}


def error(status: int, code: str) -> Outcome:
    return Outcome(End.REFUSED, status, {"code": code, "message": "why"})


def test_the_plan_is_a_function_of_the_seed_alone() -> None:
    assert make_plan(7, 150) == make_plan(7, 150)
    assert make_plan(7, 150).digest == make_plan(7, 150).digest != make_plan(8, 150).digest


@pytest.mark.parametrize("prefill_nodes", [1, 2])
def test_a_plan_has_every_disturbance_and_one_role_that_lives_on(prefill_nodes: int) -> None:
    plan = make_plan(3, 600, prefill_nodes=prefill_nodes)
    assert plan.n_rooms == 600
    assert [room.number for episode in plan.episodes for room in episode.rooms] == list(range(600))
    eras = [plan.episodes[i : i + len(DECK)] for i in range(0, len(plan.episodes) - len(DECK), len(DECK))]
    assert len(eras) >= 2
    ended = []
    for era in eras:
        assert {episode.event.kind for episode in era} == set(Kind)
        ending = (Kind.KILL, Kind.TERMINATE)
        (role,) = {episode.event.target.rstrip("01") for episode in era if episode.event.kind in ending}
        ended.append(role)
    assert ended[0] != ended[1], "prefill and decode take turns"


def beginnings(plan: Plan) -> Counter[tuple[str | None, tuple[int, ...]]]:
    """The first pages of its longer prompts, with their salts."""
    bodies = [question.body for question in plan.questions if isinstance(question.body.get("prompt"), list)]
    return Counter((b.get("cache_salt"), tuple(b["prompt"][:256])) for b in bodies if len(b["prompt"]) > 256)


def test_half_of_the_prompts_share_their_beginnings() -> None:
    found = beginnings(make_plan(3, 600))
    assert len([count for count in found.values() if count > 1]) > 5
    assert {salt for salt, _ in found} == {None, "one", "two"}
    alone = beginnings(make_plan(3, 600, n_prefixes=0))
    assert set(alone.values()) == {1}


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        (EXPECTED, QUIET),
        (Outcome(End.ABORTED, 200, choices=BEGUN), QUIET),
        (Outcome(End.ABORTED), QUIET),
        (error(502, "peer_lost"), KILL_P),
        (Outcome(End.FAILED, 200, {"code": "shutting_down"}, BEGUN), KILL_D),
        (Outcome(End.BROKEN, 200, {"code": "ReadError"}, BEGUN), KILL_D),
    ],
)
def test_what_may_happen_is_no_finding(outcome: Outcome, event: Event) -> None:
    assert judge(QUESTION, outcome, EXPECTED, event) is None


@pytest.mark.parametrize(
    ("outcome", "event", "words"),
    [
        (replace(EXPECTED, choices=WRONG), QUIET, "wrong tokens"),
        (replace(EXPECTED, choices=BEGUN), QUIET, "wrong tokens"),
        (replace(EXPECTED, choices={}), QUIET, "0 choices"),
        (replace(EXPECTED, prefill="local"), QUIET, "itself"),
        (Outcome(End.ABORTED, 200, choices=WRONG), QUIET, "wrong tokens"),
        (Outcome(End.BROKEN, 200, {"code": "ReadError"}, WRONG), KILL_D, "wrong tokens"),
        (Outcome(End.HUNG, seconds=60.0), KILL_P, "within 60.0 s"),
        (error(502, "peer_lost"), QUIET, "should harm nobody"),
        (error(500, "internal_error"), KILL_P, "no disturbance explains"),
        (error(502, "component_mismatch"), KILL_P, "no disturbance explains"),
        (error(502, "prefix_damaged"), KILL_P, "no disturbance explains"),
        (error(400, "bad_token"), KILL_P, "says nothing"),
        (Outcome(End.BROKEN, 200, {"code": "ReadError"}, BEGUN), KILL_P, "connection broke"),
    ],
)
def test_what_must_not_happen_is_a_finding(outcome: Outcome, event: Event, words: str) -> None:
    assert words in (judge(QUESTION, outcome, EXPECTED, event) or "")


def test_growth_of_a_process_is_a_finding() -> None:
    start = Resources(threads=10, fds=20, sockets=5, rss_mib=400)
    assert soak.grown(start, start, "decode") == []
    assert soak.grown(start, replace(start, fds=19, threads=11), "decode") == []
    assert "21 fds" in soak.grown(start, replace(start, fds=21), "decode")[0]
    assert "6 sockets" in soak.grown(start, replace(start, sockets=6), "decode")[0]
    many = replace(start, threads=11 + soak.EXECUTOR_THREADS)
    assert "threads" in soak.grown(start, many, "decode")[0]


def test_memory_that_is_kept_is_a_finding() -> None:
    start = Resources(threads=10, fds=20, sockets=5, rss_mib=300)
    assert soak.fatter(start, replace(start, rss_mib=329), "decode") == []
    assert soak.fatter(start, replace(start, rss_mib=331), "decode") == ["leak: decode has 331 MiB, 300 at its start"]


class Counted:
    """A prefill node as far as :func:`soak.warm_up` knows it."""

    def __init__(self, name: str) -> None:
        self.name, self.n_committed = name, 3

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        assert name == "pd_phase_seconds_count"
        return {("commit",): float(self.n_committed)}


async def test_every_prefill_node_has_had_a_prompt_before_its_resources_are_counted() -> None:
    first, second = prefills = [Counted("prefill0"), Counted("prefill1")]
    n_asked = 0

    async def ask_once() -> None:
        nonlocal n_asked
        n_asked += 1
        (first if n_asked < 6 else second).n_committed += 1

    await soak.warm_up(cast(Sequence[Node], prefills), ask_once)
    assert n_asked == 6
    assert [node.n_committed for node in prefills] == [8, 4]


def run(plan: Plan, logs: Path, **options: Any) -> Report:
    return asyncio.run(soak.soak(plan, logs, Console(file=io.StringIO()), 60.0, **options))


def of_kinds(plan: Plan, *kinds: Kind) -> Plan:
    """The first episode of each kind."""
    return replace(plan, episodes=tuple(next(e for e in plan.episodes if e.event.kind is kind) for kind in kinds))


def check(report: Report) -> None:
    assert not report.findings, "\n".join(map(str, report.findings))
    assert report.ends[End.ANSWERED] > report.plan.n_rooms // 4
    assert report.n_answered_tokens > 0


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_small_soak_finds_nothing(tmp_path: Path) -> None:
    plan = of_kinds(make_plan(1, 200), Kind.KILL, Kind.FAILED_WRITES, Kind.FLUSH, Kind.LOST_MESSAGES)
    report = run(plan, tmp_path)
    check(report)
    assert max(report.lives.values()) == 2
    assert report.prefix["tokens_reused"] > 0
    assert report.prefix["bytes_held"] > 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_hostile_clients_and_late_messages_harm_nobody(tmp_path: Path) -> None:
    check(run(of_kinds(make_plan(1, 400), *HOSTILE, Kind.LATE_MESSAGES), tmp_path))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "prefill_nodes"), [(11, 1), (12, 2)])
def test_a_soak_of_two_hundred_rooms_finds_nothing(seed: int, prefill_nodes: int, tmp_path: Path) -> None:
    check(run(make_plan(seed, 200, prefill_nodes=prefill_nodes), tmp_path))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_pair_that_answers_wrongly_is_found_out(tmp_path: Path) -> None:
    """Zeros instead of the sliding window, and nobody looks: the tokens tell."""
    plan = of_kinds(make_plan(1, 200), Kind.QUIET)
    faults = {"prefill_options": ("--fault", "zero:swa"), "decode_options": ("--fault", "unchecked")}
    report = run(plan, tmp_path, **faults)
    assert any("wrong tokens" in finding.what for finding in report.findings)
    assert {finding.event.count("quiet") for finding in report.findings} == {1}


def test_harmless_disturbances_are_disturbances() -> None:
    assert set(DECK) >= HARMLESS
