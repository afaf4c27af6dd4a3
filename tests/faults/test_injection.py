"""The hooks of a node with faults, where no test of a whole pair looks."""

from __future__ import annotations

import asyncio

import pytest

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.faults.injection import Faults, hooks_of
from server.faults.spec import FaultSet
from tests.transfer.support import make_geometry

PLACE = Placement(1, (1,))


def faults(*specs: str) -> Faults:
    found = hooks_of(FaultSet.parse(specs), Arena(ArenaLayout.from_geometry(make_geometry())))
    assert isinstance(found, Faults)
    return found


async def test_a_room_that_ends_while_it_waits_for_a_second_one_sends_nothing() -> None:
    hooks, pushed = faults("swap:swa", "swap:swa@pool"), []
    hooks.sending("room", 10, PLACE)
    hooks.before_tail("room", lambda: pushed.append("tail"), lambda: True)
    await asyncio.sleep(0)
    hooks.memory_free("room")
    _, running = await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=5.0)
    assert not running
    assert not pushed


async def test_a_room_that_is_over_is_not_damaged() -> None:
    arena = Arena(ArenaLayout.from_geometry(make_geometry()))
    hooks = hooks_of(FaultSet.parse(["zero:swa"]), arena)
    runs = arena.layout.live_runs(10, PLACE)["swa"]
    for run in runs:
        arena.write(run, b"\x01" * run.nbytes)
    hooks.sending("room", 10, PLACE)
    hooks.before_tail("room", lambda: None, lambda: False)
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=5.0)
    assert arena.read(runs) == b"\x01" * sum(run.nbytes for run in runs)


async def test_what_cannot_be_damaged_is_logged_and_sent_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("server.faults.rows.RowFaults.make")
    hooks, pushed = faults("zero:swa"), asyncio.Event()
    hooks.sending("room", 10, PLACE)
    hooks.before_tail("room", pushed.set, lambda: True)
    await asyncio.wait_for(pushed.wait(), 5.0)
    assert "room could not be damaged" in caplog.text
