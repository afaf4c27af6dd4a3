"""A pair of nodes in this process, over the loopback transport unless a file says otherwise, and nodes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from tests.nodes.processes import DecodeProcess, PrefillProcess
from tests.nodes.support import Pair, pairs


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pairs() as pair:
        yield pair


@pytest.fixture
def start_prefill() -> Iterator[Callable[..., PrefillProcess]]:
    started: list[PrefillProcess] = []

    def start(port: int = 0, chunk_delay_s: float = 0.0) -> PrefillProcess:
        started.append(PrefillProcess(port, chunk_delay_s))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def start_decode() -> Iterator[Callable[..., DecodeProcess]]:
    started: list[DecodeProcess] = []

    def start(address: str, ports: tuple[int, int] | None = None) -> DecodeProcess:
        started.append(DecodeProcess(address, ports))
        return started[-1]

    yield start
    for process in started:
        process.end()
