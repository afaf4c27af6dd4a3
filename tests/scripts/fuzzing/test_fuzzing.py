"""The fuzzer: the same seed sends the same, its account finds what a node does not count, and a real pair stands it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import fuzzing.main as fuzz
import pytest
from fuzzing.control import Account
from fuzzing.witness import Answers
from hostile.frames import RAGGED, UNDERSTOOD, FrameFuzzer, fate_of

from tests.transfer.test_protocol import MESSAGES


def drawn(seed: int, n: int = 3000) -> list[tuple[bytes, ...]]:
    fuzzer = FrameFuzzer(random.Random(seed), MESSAGES)
    return [fuzzer.draw() for _ in range(n)]


def test_the_same_seed_draws_the_same_frames() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_every_fate_occurs_and_most_frames_are_wrong() -> None:
    fates = Counter(fate_of(parts) for parts in drawn(1))
    assert {"garbage", "corrupt", "malformed", "version", "oversize", UNDERSTOOD} <= set(fates)
    assert fates[UNDERSTOOD] < 0.2 * fates.total()


def test_percentiles_are_of_the_nearest_rank() -> None:
    answers = Answers([0.4, 0.1, 0.3, 0.2])
    assert (answers.percentile(50), answers.percentile(99), Answers().percentile(99)) == (0.2, 0.4, 0.0)


def test_the_account_finds_frames_that_a_node_counts_otherwise_or_not_at_all() -> None:
    account = Account(Counter({"garbage": 3, "malformed": 4, RAGGED: 1, UNDERSTOOD: 2}))
    counted = {
        "pd_control_frames_received_total": 10.0,
        "pd_control_frames_dropped_total{reason=garbage}": 3.0,
        "pd_control_frames_dropped_total{reason=malformed}": 5.0,
    }
    assert account.mistakes({}, counted) == []
    assert account.mistakes({}, counted | {"pd_control_frames_dropped_total{reason=garbage}": 2.0}) == [
        "garbage: 3 sent, 2 counted"
    ]
    assert account.mistakes({}, counted | {"pd_control_frames_received_total": 9.0}) == ["10 sent, 9 received"]
    (line,) = account.mistakes({}, counted | {"pd_control_frames_dropped_total{reason=error}": 1.0})
    assert "1 exceptions" in line


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "report.json"
    code = fuzz.main(["--output", str(path), *arguments])
    report: dict[str, Any] = json.loads(path.read_text())
    assert (code, report["mistakes"]) == (0, [])
    return report


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_pair_stands_frames_that_nobody_should_send(tmp_path: Path) -> None:
    report = run(tmp_path, "zmq", "--frames", "5000", "--seed", "3")
    assert report["answers"]["right"] >= 3


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_small_requests_are_answered_beside_hostile_clients(tmp_path: Path) -> None:
    run(tmp_path, "clients", "--seconds", "1", "--seed", "3")


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_no_message_of_an_earlier_registration_is_obeyed(tmp_path: Path) -> None:
    run(tmp_path, "late", "--rounds", "1", "--seed", "3")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_pair_stands_requests_that_nobody_should_send(tmp_path: Path) -> None:
    report = run(tmp_path, "http", "--requests", "1000", "--seed", "3")
    assert report["answers"]["right"] >= 3
