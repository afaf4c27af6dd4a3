"""What is said of memory in quarantine."""

from __future__ import annotations

import logging

import pytest

from server.decode.quarantine import LONG_S, Quarantine
from server.failure import Failure
from server.transfer.rooms import RoomKey


def test_a_long_quarantine_is_warned_of_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    quarantine = Quarantine()
    for room, since in ((1, 0.0), (2, 10.0)):
        quarantine.enter(RoomKey(room, 1, "d"), Failure("peer_lost", "the peer is gone"), "10.0.0.1:8998", since)
    caplog.set_level(logging.WARNING)
    counts = []
    for now in (LONG_S - 1, LONG_S, LONG_S + 1, LONG_S + 10, 2 * LONG_S):
        quarantine.warn(now)
        counts.append(len(caplog.records))
    assert counts == [0, 1, 1, 2, 3]
    assert "room 1 epoch 1 is in quarantine for 30 s: prefill 10.0.0.1:8998" in caplog.messages[0]
    assert [entry["room"] for entry in quarantine.describe(20.0)] == ["1", "2"]
    assert quarantine.oldest_s(20.0) == 20.0
    quarantine.leave(RoomKey(1, 1, "d"))
    assert quarantine.oldest_s(20.0) == 10.0
