"""The ROUTER socket of the control connection closes whatever strangers do at that moment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import cast
from unittest.mock import Mock

import pytest
import zmq
from prometheus_client import CollectorRegistry

from server.faults.hooks import Hooks
from server.prefill.bootstrap import Bootstrap
from server.prefill.bootstrap_socket import BootstrapSocket
from server.transfer.auth import Guard
from server.transfer.metrics import NodeMetrics

N_CLOSES = 40


@pytest.fixture
def port_in_use() -> Iterator[list[int]]:
    """Somebody connects to the last port of this list, again and again, and closes at once."""
    ports: list[int] = []
    is_over = threading.Event()

    def connect() -> None:
        while not is_over.wait(0.0005):
            with contextlib.suppress(OSError, IndexError):
                socket.create_connection(("127.0.0.1", ports[-1]), 1.0).close()

    threads = [threading.Thread(target=connect, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield ports
    is_over.set()
    for thread in threads:
        thread.join(10.0)


@pytest.mark.timeout(60)
async def test_it_closes_while_connections_come_and_go(port_in_use: list[int]) -> None:
    for _ in range(N_CLOSES):
        opened = BootstrapSocket(Guard(), NodeMetrics(CollectorRegistry()), 5.0, Hooks())
        await opened.start(cast(Bootstrap, Mock()), "127.0.0.1", 0, None)
        port_in_use.append(opened.port)
        await asyncio.sleep(0.005)
        await opened.close()


@pytest.mark.timeout(60)
async def test_one_that_could_not_bind_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        opened = BootstrapSocket(Guard(), NodeMetrics(CollectorRegistry()), 5.0, Hooks())
        with pytest.raises(zmq.ZMQError, match="in use"):
            await opened.start(cast(Bootstrap, Mock()), "127.0.0.1", taken.getsockname()[1], None)
        await opened.close()
