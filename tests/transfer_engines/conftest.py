"""Fixtures that start peer processes and Mooncake engines and end them after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.transfer.engines.mooncake import MooncakeEngine
from tests.transfer_engines.support import Bytes, PeerProcess, Results


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[Callable[..., PeerProcess]]:
    peers: list[PeerProcess] = []

    def start(nbytes: int, session: str = "") -> PeerProcess:
        peers.append(PeerProcess(tmp_path / f"memory{len(peers)}", nbytes, session))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def start_engine() -> Iterator[Callable[[Bytes], MooncakeEngine]]:
    """Start a Mooncake engine with an array registered; all are closed at the end."""
    engines: list[MooncakeEngine] = []

    def start(memory: Bytes) -> MooncakeEngine:
        engine = MooncakeEngine(transport="tcp")
        engines.append(engine)
        engine.register(memory.ctypes.data, memory.nbytes)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def results() -> Results:
    return Results()
