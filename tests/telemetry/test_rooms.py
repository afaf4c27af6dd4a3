"""The record of a room: phases that touch, two clocks that are joined, and how many records are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.failure import Failure
from server.telemetry.record import PhaseName, RoomList, RoomRecord
from server.telemetry.rooms import DECODE, KEPT_REFUSALS, PREFILL, RoomRecorder, RoomRecords
from server.transfer.protocol import Timings
from tests.support.records import faults_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "rooms.md"
LOST = Failure("peer_lost", "it is gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def records(clock: Clock, keep: int = 8) -> RoomRecords:
    return RoomRecords(DECODE, keep, clock)


def opened(records: RoomRecords, room: int = 1, began: float | None = None) -> RoomRecorder:
    return records.open(room, f"request-{room}", n_prompt=5, max_new=4, first=PhaseName.RECEIVE, began=began)


def timings(queued_s: float, prefill_s: float, transfer_s: float, received_at: float = 7000.0) -> Timings:
    return Timings(received_at, queued_s, prefill_s, transfer_s, prefill_s, 0.0, transfer_s, 1)


def through_a_pair(records: RoomRecords, half: Timings, done_at: float = 101.0) -> RoomRecorder:
    record = opened(records, began=99.9)
    record.enter(PhaseName.QUEUE, 100.1)
    record.attempt(1, "127.0.0.1:8998", 3, 1)
    record.enter(PhaseName.RESERVE, 100.2)
    record.enter(PhaseName.PREFILL_QUEUE, 100.3)
    record.enter(PhaseName.PREFILL, 100.31)
    record.join(half, done_at)
    record.enter(PhaseName.VERIFY, done_at)
    record.enter(PhaseName.FIRST_TOKEN, done_at + 0.001234567)
    record.first_token(done_at + 0.0023456789)
    records.end(record, "length", done_at + 1 / 3)
    return record


def test_the_prefill_nodes_half_lies_in_the_middle_of_what_passed_here(clock: Clock) -> None:
    record = through_a_pair(records(clock), timings(0.1, 0.4, 0.2)).read()
    by_name = {phase.name: phase for phase in record.phases}
    assert (by_name[PhaseName.PREFILL].start_us, by_name[PhaseName.PREFILL].end_us) == (450_000, 850_000)
    assert [p.name for p in record.phases if p.node == PREFILL] == ["prefill_queue", "prefill", "transfer"]
    assert record.clocks is not None
    assert (record.clocks.uncertainty_us, record.clocks.offset_us) == (50_000, round(1e6 * (7000.0 - 100.25)))
    assert faults_of(record) == []


@pytest.mark.parametrize("prefill_s", [0.1, 1 / 3, 0.7999999, 2.0], ids=["short", "odd", "all of it", "a faster clock"])
def test_phases_sum_to_the_ttft_whatever_the_prefill_node_says(clock: Clock, prefill_s: float) -> None:
    record = through_a_pair(records(clock), timings(1e-7, prefill_s, 1e-7)).read()
    assert record.ttft_us == 1_102_346
    assert faults_of(record) == []


def test_a_second_attempt_goes_on_in_the_same_record(clock: Clock) -> None:
    kept = records(clock)
    record = opened(kept)
    record.enter(PhaseName.QUEUE, 100.0)
    record.attempt(1, "a:1", 3, 1)
    record.enter(PhaseName.RESERVE, 100.5)
    record.attempt_failed(LOST)
    record.try_again(101.0)
    record.attempt(2, "b:1", 4, 1)
    record.enter(PhaseName.RESERVE, 101.5)
    record.join(timings(0.1, 0.1, 0.1), 102.0)
    record.first_token(102.5)
    kept.end(record, "stop", 103.0)
    read = record.read()
    assert faults_of(read) == []
    names = [(p.name, p.attempt) for p in read.phases]
    assert names[:4] == [("receive", 1), ("queue", 1), ("reserve", 1), ("queue", 2)]
    assert {p.attempt for p in read.phases[4:]} == {2}
    assert [a.failure and a.failure.code for a in read.attempts] == ["peer_lost", None]


def test_a_room_that_waited_before_begins_earlier(clock: Clock) -> None:
    kept = RoomRecords(PREFILL, 8, clock)
    record = kept.open(1, "r", n_prompt=1, max_new=1, first=PhaseName.PREFILL_QUEUE, began=100.0)
    before = record.read()
    record.waited_before(PhaseName.PAIR, 98.0)
    after = record.read()
    assert [p.name for p in after.phases] == ["pair", "prefill_queue"]
    assert after.phases[0].end_us == 2_000_000
    assert before.began_unix_us - after.began_unix_us == 2_000_000


def test_only_the_last_records_are_kept_and_the_newest_of_an_id_is_found(clock: Clock) -> None:
    kept = records(clock, keep=3)
    for room in (1, 2, 3, 2, 4):
        kept.end(opened(kept, room), "stop", 101.0 + room)
    running = opened(kept, 4)
    listed = kept.listing(10)
    assert [r.room for r in listed.ended] == ["4", "2", "3"]
    assert [r.room for r in listed.running] == ["4"]
    assert [r.room for r in kept.listing(1).ended] == ["4"]
    assert kept.find(1) is None
    found, running_found = kept.find(2), kept.find(4)
    assert found is not None
    assert found.total_us == 3_000_000
    assert running_found is not None
    assert running_found.phase == "receive"
    kept.end(running, "abort", 200.0)
    kept.end(running, "stop", 300.0)
    assert [r.outcome for r in kept.listing(10).ended][:1] == ["abort"]
    assert not kept.listing(10).running


def test_refusals_are_kept_apart_and_not_for_ever(clock: Clock) -> None:
    kept = records(clock)
    for i in range(KEPT_REFUSALS + 5):
        kept.refused(f"request-{i}", 2**63 - 1 if i else None, LOST)
    listed = kept.listing(1000)
    assert len(listed.refused) == KEPT_REFUSALS
    assert (listed.refused[0].request_id, listed.refused[0].room) == (f"request-{KEPT_REFUSALS + 4}", str(2**63 - 1))


def examples() -> list[Any]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)]


def test_the_documents_examples_have_the_fields_of_the_records() -> None:
    record, listed, _state = examples()
    read = msgspec.convert(record, RoomRecord)
    assert json.loads(msgspec.json.encode(read)) == record
    assert faults_of(read) == []
    assert json.loads(msgspec.json.encode(msgspec.convert(listed, RoomList))) == listed


def test_the_document_has_every_phase() -> None:
    for name in PhaseName:
        assert f"| `{name}` |" in DOCUMENT.read_text(), name
