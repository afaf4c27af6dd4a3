"""The vocabulary of ``--fault``: what can be said, to whom, how often, and what it does to messages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from server.decode.room import DecodePhase
from server.faults.messages import MessageFaults
from server.faults.spec import MESSAGE_TYPES, PHASES, FaultError, FaultSet, parse_fault, skipped_checks
from server.prefill.room import PrefillPhase
from server.transfer.checks import Check
from server.transfer.frames import ProtocolError, decode, encode
from server.transfer.protocol import AnyMessage, Ping, Pong
from tests.nodes.support import pairs

PING, PONG = Ping("a" * 32, 1), Pong("b" * 32, 1, registered=True)


@pytest.mark.parametrize(
    "spec",
    [
        "drop:swa", "zero:c4_kv@wire", "stale:handoff@memory", "shift:c128_kv@pool", "swap:draft_swa", "forget:swa",
        "miscount:swa", "delay-writes:0.5", "late-writes:2", "fail-writes", "fail-writes:swa", "drop-message:Done",
        "duplicate-message:Reserve", "reorder-message:Ping", "corrupt-message:Abort", "kill:transfer", "unchecked",
        "unchecked:stamp", "unchecked:hit", "unchecked:offer", "flip-page:c4_kv", "vary-page:c4_index", "flip-snapshot",
        "stale-snapshot", "shift-snapshot", "overwrite-offer", "evict-offer",
    ],
)  # fmt: skip
def test_a_fault_is_shown_as_it_was_written(spec: str) -> None:
    assert str(parse_fault(spec)) == spec
    assert parse_fault(spec).left is None
    assert parse_fault(f"{spec}:3").left == 3


@pytest.mark.parametrize(
    "spec",
    [
        "drop", "drop:", "drop:swaa", "burn:swa", "drop:swa:x", "drop:swa@moon", "drop:swa@", "drop:@wire",
        "forget:swa@wire", "kill", "kill:lunch", "drop-message", "drop-message:Hello", "delay-writes",
        "delay-writes:soon", "unchecked:luck", "zero:swa:1:2", "flip-page", "flip-page:swa", "flip-snapshot:swa",
        "evict-offer:1:2", "collide-keys:1",
    ],
)  # fmt: skip
def test_faults_that_do_not_exist_are_refused(spec: str) -> None:
    with pytest.raises(FaultError, match=spec):
        FaultSet.parse([spec])


@pytest.mark.parametrize(
    ("spec", "role"),
    [
        ("drop:swa", "prefill"), ("zero:swa@pool", "prefill"), ("zero:swa@memory", "decode"),
        ("fail-writes", "prefill"), ("drop-message:Reserve", "decode"), ("drop-message:Done", "prefill"),
        ("kill:verify", "decode"), ("kill:commit", "prefill"), ("stale-snapshot", "prefill"),
        ("flip-snapshot", "prefill"), ("shift-snapshot", "prefill"), ("vary-page:c4_kv", "decode"),
        ("overwrite-offer", "decode"), ("evict-offer", "decode"),
    ],
)  # fmt: skip
def test_a_fault_of_the_other_node_is_refused_with_its_name(spec: str, role: str) -> None:
    other = {"prefill": "decode", "decode": "prefill"}[role]
    FaultSet.parse([spec], role)
    with pytest.raises(FaultError, match=f"give it to launch_{role}"):
        FaultSet.parse([spec], other)


def test_phases_are_those_of_the_rooms() -> None:
    """And two around them: ``waiting`` and ``pair`` come before a room is reserved, ``decode`` after it is over."""
    assert set(PHASES["prefill"]) == (set(PrefillPhase) - {"ending"}) | {"pair"}
    assert set(PHASES["decode"]) == (set(DecodePhase) - {"ending", "over"}) | {"waiting", "pair", "decode"}


@pytest.mark.parametrize("spec", ["flip-page:c4_kv", "collide-keys", "unchecked:hit"])
def test_a_fault_of_both_nodes_is_taken_by_either(spec: str) -> None:
    assert str(parse_fault(spec, "prefill")) == str(parse_fault(spec, "decode")) == spec


def test_a_count_is_used_up() -> None:
    faults = FaultSet.parse(["drop:swa:2", "zero:swa"])
    assert [[str(fault) for fault in faults.of_room("room")] for _ in range(3)] == [
        ["drop:swa", "zero:swa"],
        ["drop:swa", "zero:swa"],
        ["zero:swa"],
    ]


def test_a_file_is_read_again_when_it_has_changed_and_its_counts_last_until_then(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    faults = FaultSet.parse((f"@{file}",))

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    assert faults.of_room("room 1") == ()
    write("drop:swa:1 zero:c4_kv\n nonsense")
    assert [str(fault) for fault in faults.of_room("room 2")] == ["drop:swa", "zero:c4_kv"]
    assert [str(fault) for fault in faults.of_room("room 3")] == ["zero:c4_kv"]
    write("drop:swa:1")
    assert [str(fault) for fault in faults.of_room("room 4")] == ["drop:swa"]
    file.unlink()
    assert faults.of_room("room 5") == ()


async def test_a_node_shows_its_faults_and_the_files_of_them() -> None:
    async with pairs() as pair:
        p = await pair.prefill(faults=("drop:swa:1", "@/nowhere/faults"))
        assert p.node.server_info()["faults"] == ["drop:swa", "@/nowhere/faults"]


def test_one_check_or_all_are_switched_off() -> None:
    assert skipped_checks([parse_fault("unchecked")]) == frozenset(Check)
    assert skipped_checks([parse_fault("unchecked:digest"), parse_fault("drop:swa")]) == {Check.DIGEST}


@pytest.mark.parametrize(("count", "entered", "dies"), [("", 1, True), (":2", 1, False), (":2", 2, True)])
def test_a_process_kills_itself_when_a_room_enters_the_phase(count: str, entered: int, dies: bool) -> None:
    code = f"""
from server.faults.spec import FaultSet
faults = FaultSet.parse(["kill:transfer{count}"], "prefill")
faults.entered("prefill")
for _ in range({entered}):
    faults.entered("transfer")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == (-9 if dies else 0), done.stderr


async def sent(spec: str, *messages: AnyMessage) -> list[str]:
    """What arrives of ``messages``, else of Ping, Pong, Ping, by type or ``refused``, in order."""
    arrived: list[bytes] = []
    faults = MessageFaults(FaultSet.parse([spec]))
    for message in messages or (PING, PONG, PING):
        faults.post(message, encode(message), arrived.append)
    await asyncio.sleep(0)
    found = []
    for frame in arrived:
        try:
            found.append(type(decode(frame)).__name__)
        except ProtocolError:
            found.append("refused")
    return found


@pytest.mark.parametrize(
    ("spec", "arrived"),
    [
        ("drop-message:Ping:1", ["Pong", "Ping"]),
        ("duplicate-message:Pong", ["Ping", "Pong", "Pong", "Ping"]),
        ("reorder-message:Ping:1", ["Pong", "Ping", "Ping"]),
        ("corrupt-message:Ping:1", ["refused", "Pong", "Ping"]),
        ("drop-message:Done", ["Ping", "Pong", "Ping"]),
    ],
)
async def test_messages_are_lost_doubled_reordered_and_damaged(spec: str, arrived: list[str]) -> None:
    assert await sent(spec) == arrived


async def test_a_late_message_goes_behind_the_first_one_of_a_later_registration() -> None:
    later = (Ping("a" * 32, 2), Ping("a" * 32, 2))
    assert await sent("late-message:Pong", PONG, PING, *later) == ["Ping", "Ping", "Pong", "Ping"]


async def test_a_message_that_no_other_follows_is_sent_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.faults.messages.REORDER_WAIT_S", 0.01)
    arrived = asyncio.Event()
    MessageFaults(FaultSet.parse(["reorder-message:Ping"])).post(PING, encode(PING), lambda frame: arrived.set())
    assert not arrived.is_set()
    await asyncio.wait_for(arrived.wait(), 5.0)


def test_every_message_has_a_sender() -> None:
    assert "Done" in MESSAGE_TYPES["prefill"]
    assert "Reserve" in MESSAGE_TYPES["decode"]
    assert not set(MESSAGE_TYPES["prefill"]) & set(MESSAGE_TYPES["decode"])


def test_rooms_are_misplaced_while_a_fault_of_the_pool_is_left() -> None:
    faults = FaultSet.parse(("stale:swa@pool:1", "zero:swa"))
    assert faults.misplace_rooms
    for room in ("1", "2"):
        faults.of_room(room)
        assert not faults.misplace_rooms
