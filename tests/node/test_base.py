"""What both nodes do with their engine's events."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from server.engine.events import Died, Event, Scrubbed
from server.engine.request import Generation, GenerationRequest
from server.failure import Failure
from server.node.base import BaseNode
from server.node.context import NodeSettings


class Manager:
    """Notes events; fails on one whose key is ``bad``."""

    records: Any = Mock()
    request_metrics: Any = Mock()

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.taken = asyncio.Event()

    def tick(self) -> None: ...
    def drain(self, failure: Failure) -> None: ...
    def refuse_all(self, failure: Failure) -> None: ...

    def engine_died(self, failure: Failure) -> None:
        self.seen.append(failure.code)
        self.taken.set()

    def on_engine_event(self, event: Event) -> None:
        if event == Scrubbed("bad"):
            raise ZeroDivisionError("simulated")
        self.seen.append(event)
        self.taken.set()


class Node(BaseNode):
    role = "test"
    busy = False
    manager: Manager

    def __init__(self) -> None:
        super().__init__(NodeSettings(model_name="m", max_context=1), Mock())
        self.manager = Manager()

    async def _open(self) -> None: ...
    async def _close(self) -> None: ...

    async def _ready(self) -> tuple[bool, str]:
        return True, ""

    def _info(self) -> dict[str, Any]:
        return {}

    def _counts(self) -> tuple[int, int]:
        return 0, 0

    def submit(self, request: GenerationRequest) -> Generation:
        raise NotImplementedError


async def test_events_are_taken_in_their_order_and_one_that_fails_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node()
    node.on_engine_event(Scrubbed("before the start"))

    def engine() -> None:
        for key in (1, "bad", 2):
            node.on_engine_event(Scrubbed(key))

    await node.start()
    thread = threading.Thread(target=engine)
    thread.start()
    async with asyncio.timeout(20):
        while len(node.manager.seen) < 3:
            node.manager.taken.clear()
            await node.manager.taken.wait()
    assert node.manager.seen == [Scrubbed("before the start"), Scrubbed(1), Scrubbed(2)]
    assert "the test node failed on Scrubbed" in caplog.text
    thread.join()
    await node.stop()


async def test_a_dead_engine_is_the_end_of_the_node() -> None:
    node = Node()
    await node.start()
    node.on_engine_event(Died("ValueError: simulated"))
    async with asyncio.timeout(20):
        await node.manager.taken.wait()
    assert node.manager.seen == ["engine_died"]
    assert await node.ready() == (False, "the engine thread has ended: ValueError: simulated")
    await node.stop()
