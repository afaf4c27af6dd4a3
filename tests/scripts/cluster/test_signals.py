"""Stop signals: raised once, never in the middle of a start, and not while the end is under way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster import Cluster, Node, StopRequested, StopSignals


class SignalledAtStart(Node):
    """A node at whose start a stop signal comes."""

    started = False

    def start(self, *_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.started = True


def test_a_signal_during_the_start_waits_until_every_process_is_known(tmp_path: Path) -> None:
    both = [SignalledAtStart(role, tmp_path / role) for role in ("prefill", "decode")]
    with StopSignals(), pytest.raises(StopRequested, match="SIGTERM"):
        Cluster(both).start()
    assert all(node.started for node in both)


def test_only_the_first_signal_is_raised() -> None:
    with StopSignals():
        with pytest.raises(StopRequested, match="SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_no_signal_is_raised_while_the_end_is_under_way() -> None:
    with StopSignals():
        StopSignals.ignore()
        os.kill(os.getpid(), signal.SIGINT)
