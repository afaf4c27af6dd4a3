"""The faulty engine does to the bytes under a rule what its name says, and to no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from server.faults.spec import FaultKind
from server.faults.writes import FaultyEngine, Rule, WriteFaults
from server.transfer.engines.base import PieceStatus
from server.transfer.engines.loopback import LoopbackEngine
from tests.transfer_engines.support import Bytes, random_bytes

NBYTES = 4096
UNDER = slice(1000, 1500)


@dataclass
class Bench:
    faults: WriteFaults
    sender: FaultyEngine
    receiver: LoopbackEngine
    source: Bytes
    target: Bytes

    def arm(self, kind: FaultKind, data: bytes = b"", seconds: float = 0.0) -> None:
        address = self.source.ctypes.data + UNDER.start
        self.faults.arm("room", (Rule(kind, address, UNDER.stop - UNDER.start, data, seconds),))

    def write(self, start: int = 0, stop: int = NBYTES) -> PieceStatus:
        src, dst = self.source.ctypes.data + start, self.target.ctypes.data + start
        ticket = self.sender.submit(self.receiver.session, src, dst, stop - start)
        deadline = time.monotonic() + 10.0
        while (status := self.sender.poll(ticket)) is PieceStatus.RUNNING:
            assert time.monotonic() < deadline
        return status


@pytest.fixture
def bench() -> Iterator[Bench]:
    source, target = random_bytes(NBYTES), np.zeros(NBYTES, np.uint8)
    faults, receiver = WriteFaults(), LoopbackEngine()
    sender = FaultyEngine(LoopbackEngine(), faults)
    sender.register(source.ctypes.data, NBYTES)
    receiver.register(target.ctypes.data, NBYTES)
    yield Bench(faults, sender, receiver, source, target)
    sender.close()
    receiver.close()


def test_without_a_rule_every_byte_arrives(bench: Bench) -> None:
    assert bench.write() is PieceStatus.APPLIED
    assert np.array_equal(bench.source, bench.target)


def test_replaced_bytes_arrive_instead_and_the_source_stays_right(bench: Bench) -> None:
    before = bench.source.copy()
    bench.arm(FaultKind.ZERO, bytes(500))
    assert [bench.write(0, 1200), bench.write(1200)] == [PieceStatus.APPLIED] * 2
    expected = before.copy()
    expected[UNDER] = 0
    assert np.array_equal(bench.target, expected)
    assert np.array_equal(bench.source, before)
    bench.faults.disarm("room")
    bench.write()
    assert np.array_equal(bench.target, before)


def test_skipped_bytes_do_not_arrive_and_are_reported_applied(bench: Bench) -> None:
    bench.arm(FaultKind.DROP)
    assert [bench.write(), bench.write(UNDER.start, UNDER.stop)] == [PieceStatus.APPLIED] * 2
    expected = bench.source.copy()
    expected[UNDER] = 0
    assert np.array_equal(bench.target, expected)


def test_a_refused_piece_writes_nothing_and_its_neighbour_arrives(bench: Bench) -> None:
    bench.arm(FaultKind.FAIL_WRITES)
    assert bench.write(0, 1001) is PieceStatus.REFUSED
    assert not bench.target.any()
    assert bench.write(0, 1000) is PieceStatus.APPLIED
    assert np.array_equal(bench.target[:1000], bench.source[:1000])


def test_a_delayed_piece_is_running_until_it_is_written(bench: Bench) -> None:
    bench.arm(FaultKind.DELAY_WRITES, seconds=0.05)
    started = time.monotonic()
    assert bench.write() is PieceStatus.APPLIED
    assert time.monotonic() - started >= 0.05
    assert np.array_equal(bench.source, bench.target)


def test_a_late_piece_is_unknown_and_lands_as_it_was(bench: Bench) -> None:
    bench.arm(FaultKind.LATE_WRITES, seconds=0.05)
    before = bench.source.copy()
    assert bench.write() is PieceStatus.UNKNOWN
    bench.source[:] = 0
    deadline = time.monotonic() + 10.0
    while not np.array_equal(bench.target, before):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_closed_engine_writes_nothing_late(bench: Bench) -> None:
    bench.arm(FaultKind.LATE_WRITES, seconds=60.0)
    before = set(threading.enumerate())
    assert bench.write() is PieceStatus.UNKNOWN
    (timer,) = (each for each in threading.enumerate() if isinstance(each, threading.Timer) and each not in before)
    bench.sender.close()
    timer.join(10.0)
    assert not timer.is_alive()
    assert not bench.target.any()
