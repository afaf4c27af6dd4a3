"""The in-process engine behaves like a real one, and each fate does what its name says."""

from __future__ import annotations

import numpy as np
import pytest

from server.transfer.engines.base import EngineClosed, PieceStatus, RegistrationFailed, SubmitFailed
from server.transfer.engines.loopback import LoopbackEngine, PieceFate
from tests.transfer_engines.support import Bytes, random_bytes


def endpoints(
    fate: PieceFate | None = None, at: int = 0, delay_s: float = 0.0
) -> tuple[LoopbackEngine, LoopbackEngine, Bytes, Bytes]:
    source, target = random_bytes(4096), np.zeros(4096, np.uint8)
    sender = LoopbackEngine(fate_of=lambda piece: fate if piece.ordinal == at else None, delay_s=delay_s)
    receiver = LoopbackEngine()
    receiver.register(target.ctypes.data, target.nbytes)
    return sender, receiver, source, target


def write(sender: LoopbackEngine, receiver: LoopbackEngine, source: Bytes, target: Bytes) -> PieceStatus:
    return sender.poll(sender.submit(receiver.session, source.ctypes.data, target.ctypes.data, source.nbytes))


def test_a_piece_is_applied_byte_for_byte() -> None:
    sender, receiver, source, target = endpoints()
    assert write(sender, receiver, source, target) is PieceStatus.APPLIED
    assert np.array_equal(source, target)


def test_a_piece_that_leaves_registered_memory_is_refused_and_not_written() -> None:
    sender, receiver, source, target = endpoints()
    ticket = sender.submit(receiver.session, source.ctypes.data, target.ctypes.data + 1, target.nbytes)
    assert sender.poll(ticket) is PieceStatus.REFUSED
    assert not target.any()


def test_a_ticket_is_gone_after_a_terminal_answer() -> None:
    sender, receiver, source, target = endpoints()
    ticket = sender.submit(receiver.session, source.ctypes.data, target.ctypes.data, source.nbytes)
    assert sender.poll(ticket) is PieceStatus.APPLIED
    with pytest.raises(KeyError):
        sender.poll(ticket)


def test_overlapping_and_empty_regions_are_refused() -> None:
    _, receiver, _, target = endpoints()
    with pytest.raises(RegistrationFailed, match="overlaps"):
        receiver.register(target.ctypes.data + 100, 1)
    with pytest.raises(RegistrationFailed, match="at least one byte"):
        receiver.register(target.ctypes.data + 8192, 0)


@pytest.mark.parametrize(
    ("fate", "status"),
    [
        (PieceFate.REFUSE, PieceStatus.REFUSED),
        (PieceFate.LOSE, PieceStatus.UNKNOWN),
        (PieceFate.LAND_LATE, PieceStatus.UNKNOWN),
    ],
)
def test_a_fault_hits_its_piece_alone_and_writes_nothing(fate: PieceFate, status: PieceStatus) -> None:
    sender, receiver, source, target = endpoints(fate, at=1)
    assert write(sender, receiver, source[:8], target[:8]) is PieceStatus.APPLIED
    assert write(sender, receiver, source[8:], target[8:]) is status
    assert target[:8].all()
    assert not target[8:].any()


def test_a_late_piece_lands_after_it_was_given_up() -> None:
    sender, receiver, source, target = endpoints(PieceFate.LAND_LATE)
    assert write(sender, receiver, source, target) is PieceStatus.UNKNOWN
    assert sender.land_late() == source.nbytes
    assert np.array_equal(source, target)


def test_no_piece_lands_through_a_closed_receiver() -> None:
    sender, receiver, source, target = endpoints(PieceFate.LAND_LATE)
    assert write(sender, receiver, source, target) is PieceStatus.UNKNOWN
    receiver.close()
    assert sender.land_late() == 0
    assert not target.any()
    with pytest.raises(SubmitFailed, match=receiver.session):
        write(sender, receiver, source, target)


def test_a_hanging_piece_runs_until_it_is_released() -> None:
    sender, receiver, source, target = endpoints(PieceFate.HANG)
    ticket = sender.submit(receiver.session, source.ctypes.data, target.ctypes.data, source.nbytes)
    assert {sender.poll(ticket) for _ in range(100)} == {PieceStatus.RUNNING}
    sender.release()
    assert sender.poll(ticket) is PieceStatus.APPLIED


def test_a_corrupted_piece_is_called_applied_and_differs_in_one_byte() -> None:
    sender, receiver, source, target = endpoints(PieceFate.CORRUPT)
    assert write(sender, receiver, source, target) is PieceStatus.APPLIED
    assert np.flatnonzero(source != target).tolist() == [0]


def test_a_delayed_piece_is_not_there_before_its_time() -> None:
    sender, receiver, source, target = endpoints(delay_s=60.0)
    assert write(sender, receiver, source, target) is PieceStatus.RUNNING
    assert not target.any()


def test_a_closed_engine_takes_nothing() -> None:
    sender, receiver, source, target = endpoints()
    sender.close()
    with pytest.raises(EngineClosed):
        write(sender, receiver, source, target)
