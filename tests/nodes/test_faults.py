"""Faults in the writes, the messages and the phases of rooms: a typed error or the right answer, and no leak."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from server.cache.layout import Placement
from server.cache.owners import Owner
from server.cache.specs import Scope
from server.failure import RequestFailed
from server.faults.spec import MESSAGE_TYPES, MESSAGES, PHASES
from tests.nodes.support import COMPONENTS, NodeUnderTest, Pair, all_free, answer, assert_works_again, expected, request
from tests.support.waiting import until

AFTER_A_FAILURE = ("Rejected", "Abort", "Failed", "Quiesced")
"""Messages of rooms that end without a commit."""


class Files:
    """The fault files of a pair."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, role: str) -> tuple[str, ...]:
        return (f"@{self._directory / role}",)

    def arm(self, role: str, *faults: str) -> None:
        (self._directory / "new").write_text("\n".join(faults))
        (self._directory / "new").rename(self._directory / role)


async def start(pair: Pair, files: Files) -> tuple[NodeUnderTest, NodeUnderTest]:
    p = await pair.prefill(faults=files.of("prefill"))
    return p, await pair.decode(p, faults=files.of("decode"))


@pytest.mark.parametrize("component", COMPONENTS)
async def test_refused_writes_of_any_component_fail_the_room(pair: Pair, component: str) -> None:
    p = await pair.prefill(faults=(f"fail-writes:{component}:1",))
    d = await pair.decode(p)
    with pytest.raises(RequestFailed, match="refused") as caught:
        await answer(d.node, request(199))
    assert (caught.value.code, caught.value.component) == ("transfer_failed", component)
    await assert_works_again(p, d)
    assert d.metric("pd_fences_total") == 0


@pytest.mark.parametrize("component", COMPONENTS)
async def test_rows_in_another_slot_or_page_of_the_pool_are_never_sent(pair: Pair, component: str) -> None:
    """Refused when the copy plan is made: this engine looks at no stamp."""
    p = await pair.prefill(faults=(f"shift:{component}@pool:1",))
    d = await pair.decode(p)
    with pytest.raises(RequestFailed, match=f"{component}: .* belongs to nobody, expected room") as caught:
        await answer(d.node, request(199))
    assert (caught.value.code, caught.value.component) == ("wrong_owner", component)
    assert p.metric("pd_check_failures_total", check="stamp", component=component) == 1
    assert p.engine.prefilled == []
    await assert_works_again(p, d)


async def test_writes_of_unknown_fate_fail_the_room_and_its_memory_comes_back_by_a_fence(pair: Pair) -> None:
    p = await pair.prefill(faults=("late-writes:30:1",))
    d = await pair.decode(p)
    with pytest.raises(RequestFailed, match="unknown"):
        await answer(d.node, request(270))
    await assert_works_again(p, d)
    assert d.metric("pd_fences_total") == 1


async def test_delayed_writes_are_waited_for(pair: Pair) -> None:
    p = await pair.prefill(faults=("delay-writes:0.3:1",))
    d = await pair.decode(p)
    assert await answer(d.node, request(270)) == expected(request(270))
    await assert_works_again(p, d)


async def test_without_a_second_room_nothing_is_swapped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.faults.rows.SWAP_WAIT_S", 0.1)
    p = await pair.prefill(faults=("swap:swa:1", "swap:swa@pool:1"))
    d = await pair.decode(p)
    assert await answer(d.node, request(270)) == expected(request(270))
    await assert_works_again(p, d)


@pytest.mark.parametrize("kind", sorted(MESSAGES))
async def test_no_lost_doubled_late_or_damaged_message_gives_a_wrong_answer_or_a_leak(
    pair: Pair, tmp_path: Path, kind: str
) -> None:
    files = Files(tmp_path)
    p, d = await start(pair, files)
    for role, names in MESSAGE_TYPES.items():
        for i, name in enumerate(names):
            failing = ("zero:swa@pool:1",) if name == "Failed" else ("drop:swa:1",) if name in AFTER_A_FAILURE else ()
            faults = {"prefill": list(failing), "decode": []}
            faults[role].append(f"{kind}:{name}:1")
            for node, lines in faults.items():
                files.arm(node, *lines)
            asked = request(150, seed=100 + i)
            (found,) = await asyncio.gather(answer(d.node, asked), return_exceptions=True)
            assert found == expected(asked) or (failing and isinstance(found, RequestFailed)), (kind, name, found)
            await until(lambda: all_free(p) and all_free(d), what=f"{kind}:{name} {p.counts()} {d.counts()}")
    for role in MESSAGE_TYPES:
        files.arm(role)
    await assert_works_again(p, d)


async def test_rooms_pass_every_phase_in_which_a_node_can_be_killed(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, kills = Files(tmp_path), []
    p, d = await start(pair, files)
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append((pid, number)))
    passed = {role: set(phases) - {"pair"} for role, phases in PHASES.items()}  # which is for rooms that a router named
    late = {"prefill": ["delay-writes:0.5:1"], "decode": []}  # the decode node hears of a transfer that lasts
    for role, phases in passed.items():
        files.arm(role, *late[role], *(f"kill:{phase}:1" for phase in phases))
    await answer(d.node, request(270))
    await until(lambda: all_free(p) and all_free(d))
    assert kills == [(os.getpid(), signal.SIGKILL)] * sum(map(len, passed.values()))


@pytest.mark.parametrize(("stamped_as_others", "component"), [("slot", "swa"), ("pages", "c4_kv")])
async def test_memory_that_was_another_rooms_before_fails_the_decode_nodes_room_by_name(
    pair: Pair, stamped_as_others: str, component: str
) -> None:
    """As if the allocator had granted it twice: the room that came second fails, the stamps of the first stay."""
    p = await pair.prefill()
    d = await pair.decode(p)
    owners, other = d.parts.arena.owners, Owner(7, 7)
    p.engine.gate.clear()
    running = asyncio.create_task(answer(d.node, request(199)))
    await until(lambda: any(req.placement for req in d.node.manager.reqs.values()))
    (req,) = d.node.manager.reqs.values()
    ours, memory = req.key.owner, req.placement
    first, second = (other, ours) if stamped_as_others == "slot" else (ours, other)
    owners.clear(memory, ours)
    owners.stamp(Placement(memory.slot, ()), first)
    owners.stamp(memory, second)
    p.engine.gate.set()
    with pytest.raises(RequestFailed, match=f"{component}: .* belongs to room 7 epoch 7, expected {ours}") as caught:
        await running
    assert (caught.value.code, caught.value.component) == ("wrong_owner", component)
    assert d.metric("pd_check_failures_total", check="stamp", component=component) == 1
    await until(lambda: all_free(d))
    item = memory.slot if stamped_as_others == "slot" else memory.pages[0]
    assert owners.owner_of(Scope.SLOT if stamped_as_others == "slot" else Scope.PAGE, item) == other
    owners.clear(memory, other)
    await assert_works_again(p, d)


async def test_a_done_that_is_sent_again_is_answered_again(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p, faults=("drop-message:Committed:1",))
    assert await answer(d.node, request(40)) == expected(request(40))
    await until(lambda: not p.node.busy, 10.0)
    assert p.metric("pd_rooms_total", outcome="committed", reason="") == 1
