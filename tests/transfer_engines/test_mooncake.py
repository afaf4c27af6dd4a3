"""Mooncake over TCP as the engine presents it: what its answers mean, what unregistering stops, what closing stops."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from server.transfer.engines import mooncake
from server.transfer.engines.base import (
    EngineClosed,
    PieceStatus,
    RegistrationFailed,
    SubmitFailed,
    TransportMisconfigured,
    TransportUnavailable,
)
from server.transfer.engines.mooncake import MooncakeEngine, describe_segment
from tests.transfer_engines.support import MIB, ROOT, Bytes, PeerProcess, random_bytes, wait_until_ended

StartEngine = Callable[[Bytes], MooncakeEngine]


def test_a_piece_is_applied_byte_for_byte(start_engine: StartEngine) -> None:
    source, target = random_bytes(8 * MIB), np.zeros(8 * MIB, np.uint8)
    sender, receiver = start_engine(source), start_engine(target)
    ticket = sender.submit(receiver.session, source.ctypes.data + 5, target.ctypes.data + 77, 3 * MIB)
    assert wait_until_ended(sender, ticket) is PieceStatus.APPLIED
    assert np.array_equal(target[77 : 77 + 3 * MIB], source[5 : 5 + 3 * MIB])
    assert np.count_nonzero(target) == 3 * MIB


def test_the_transport_is_what_the_engine_says_of_itself(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    memory = np.zeros(4096, np.uint8)
    engine = start_engine(memory)
    assert engine.transport == "tcp"
    assert importlib.metadata.version("mooncake-transfer-engine-non-cuda") in engine.version
    assert describe_segment(engine.session, 2.0).regions == ((memory.ctypes.data, memory.nbytes),)
    assert "MC_FORCE_TCP" not in os.environ


def test_one_bad_address_is_refused_and_the_other_pieces_are_applied(start_engine: StartEngine) -> None:
    source, target = random_bytes(16 * 65536), np.zeros(16 * 65536, np.uint8)
    sender, receiver = start_engine(source), start_engine(target)
    offsets = [i * 65536 for i in range(16)]
    destinations = [target.ctypes.data + offset for offset in offsets]
    destinations[7] = target.ctypes.data + target.nbytes - 1  # starts inside, ends outside
    tickets = [
        sender.submit(receiver.session, source.ctypes.data + offset, destination, 65536)
        for offset, destination in zip(offsets, destinations, strict=True)
    ]
    statuses = [wait_until_ended(sender, ticket) for ticket in tickets]
    assert [i for i, status in enumerate(statuses) if status is PieceStatus.REFUSED] == [7]
    assert statuses.count(PieceStatus.APPLIED) == 15
    expected = source.copy()
    expected[offsets[7] : offsets[8]] = 0
    assert np.array_equal(target, expected)


def test_memory_registered_with_two_engines_stays_writable_through_one(start_engine: StartEngine) -> None:
    source, target = random_bytes(4096), np.zeros(4096, np.uint8)
    sender, first, second = start_engine(source), start_engine(target), start_engine(target)

    def write(session: str) -> PieceStatus:
        return wait_until_ended(sender, sender.submit(session, source.ctypes.data, target.ctypes.data, 4096))

    assert write(first.session) is PieceStatus.APPLIED
    first.unregister(target.ctypes.data)
    target[:] = 0
    assert write(first.session) is PieceStatus.UNKNOWN  # it was registered once: an earlier write may be under way
    assert not target.any()
    assert write(second.session) is PieceStatus.APPLIED
    assert np.array_equal(source, target)


def start_large_write(
    start_engine: StartEngine, nbytes: int
) -> tuple[MooncakeEngine, MooncakeEngine, Bytes, Callable[[], PieceStatus]]:
    """A write of ``nbytes`` that has begun when this returns, and the wait for its end."""
    source, target = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
    sender, receiver = start_engine(source), start_engine(target)
    ticket = sender.submit(receiver.session, source.ctypes.data, target.ctypes.data, nbytes)
    while not target[0]:
        time.sleep(1e-4)

    def end() -> PieceStatus:
        status = wait_until_ended(sender, ticket)
        assert source.all()  # keeps the source memory alive until here
        return status

    return sender, receiver, target, end


def test_unregistering_does_not_stop_a_write_that_has_begun(start_engine: StartEngine) -> None:
    """Why unregistering alone is no fence: the receiver checks an address when a write begins, and never again."""
    sender, receiver, target, end = start_large_write(start_engine, 256 * MIB)
    receiver.unregister(target.ctypes.data)
    assert not target[-1], "the write ended before the memory was unregistered: this run shows nothing"
    assert end() is PieceStatus.APPLIED
    assert target.all()
    target[:4096] = 0
    source = random_bytes(4096)
    late = sender.submit(receiver.session, source.ctypes.data, target.ctypes.data, 4096)
    assert wait_until_ended(sender, late) is PieceStatus.UNKNOWN
    assert not target[:4096].any()


def test_closing_the_receiver_is_a_fence(start_engine: StartEngine) -> None:
    """No byte of a write in flight lands after ``close`` has returned, and other engines reach the same memory."""
    sender, receiver, target, end = start_large_write(start_engine, 256 * MIB)
    other = start_engine(target)
    receiver.close()
    landed = np.count_nonzero(target)
    assert landed < target.nbytes, "the write ended before the receiver was closed: this run shows nothing"
    assert end() is PieceStatus.UNKNOWN
    time.sleep(0.3)
    assert np.count_nonzero(target) == landed
    with pytest.raises(EngineClosed):
        receiver.unregister(target.ctypes.data)
    source = random_bytes(4096)
    assert (
        wait_until_ended(sender, sender.submit(other.session, source.ctypes.data, target.ctypes.data, 4096))
        is PieceStatus.APPLIED
    )
    assert np.array_equal(target[:4096], source)


def test_closing_does_not_stop_the_process_for_long(start_engine: StartEngine) -> None:
    """Mooncake's destructor keeps the interpreter lock; left alone it does so for up to a second, every time."""
    assert min(longest_pause_while_closing(start_engine) for _ in range(5)) < 0.5


def longest_pause_while_closing(start_engine: StartEngine) -> float:
    """Seconds for which another thread stood still."""
    engine = start_engine(np.zeros(4096, np.uint8))
    time.sleep(0.05)  # its listener has gone to sleep
    longest_s, is_over = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest_s
        while not is_over.is_set():
            before = time.monotonic()
            time.sleep(1e-3)
            longest_s = max(longest_s, time.monotonic() - before)

    ticker = threading.Thread(target=tick)
    ticker.start()
    engine.close()
    is_over.set()
    ticker.join()
    return longest_s


def test_a_killed_peer_is_unknown_at_once(start_engine: StartEngine, start_peer: Callable[..., PeerProcess]) -> None:
    source = np.full(256 * MIB, 7, np.uint8)
    sender, peer = start_engine(source), start_peer(source.nbytes)
    first = sender.submit(peer.session, source.ctypes.data, peer.address, 1)
    assert wait_until_ended(sender, first) is PieceStatus.APPLIED
    peer.freeze()  # so that the write cannot end before the kill
    ticket = sender.submit(peer.session, source.ctypes.data, peer.address, source.nbytes)
    peer.kill()
    killed = time.monotonic()
    assert wait_until_ended(sender, ticket) is PieceStatus.UNKNOWN
    assert time.monotonic() - killed < 10.0  # 10 ms on an idle machine


def test_a_write_given_up_for_lack_of_progress_is_unknown_and_lands_later(
    start_engine: StartEngine, start_peer: Callable[..., PeerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The -1 that is no refusal: the frozen peer applies what its socket buffers hold when it runs again."""
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    source = np.full(MIB, 7, np.uint8)
    sender, peer = start_engine(source), start_peer(source.nbytes)
    assert (
        wait_until_ended(sender, sender.submit(peer.session, source.ctypes.data, peer.address, 1))
        is PieceStatus.APPLIED
    )
    peer.freeze()
    ticket = sender.submit(peer.session, source.ctypes.data, peer.address, source.nbytes)
    assert wait_until_ended(sender, ticket) is PieceStatus.UNKNOWN
    assert np.count_nonzero(peer.memory) == 1
    peer.thaw()
    deadline = time.monotonic() + 30.0
    while np.count_nonzero(peer.memory) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert np.count_nonzero(peer.memory) > 1


def test_the_first_piece_for_a_frozen_peer_is_not_taken_and_does_not_block(
    start_engine: StartEngine, start_peer: Callable[..., PeerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "PEER_ANSWER_TIMEOUT_S", 0.3)
    source = random_bytes(4096)
    sender, peer = start_engine(source), start_peer(source.nbytes)
    peer.freeze()
    started = time.monotonic()
    with pytest.raises(SubmitFailed, match=f"{peer.session} does not answer"):
        sender.submit(peer.session, source.ctypes.data, peer.address, 4096)
    assert time.monotonic() - started < 15.0  # Mooncake's own call blocks for up to a minute
    peer.thaw()
    time.sleep(0.1)
    assert not peer.memory.any()


def test_a_peer_that_is_not_there_is_not_submitted_to(start_engine: StartEngine) -> None:
    source = random_bytes(4096)
    sender = start_engine(source)
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    with pytest.raises(SubmitFailed, match="does not answer"):
        sender.submit(f"127.0.0.1:{free_port}", source.ctypes.data, source.ctypes.data, 4096)


@pytest.mark.full  # the port is free again only a minute after the first process used it
@pytest.mark.timeout(300)
def test_a_restarted_peer_on_the_same_port_is_reached_by_a_new_engine(
    start_engine: StartEngine, start_peer: Callable[..., PeerProcess]
) -> None:
    source = random_bytes(4096)
    old_engine, old = start_engine(source), start_peer(source.nbytes)
    ticket = old_engine.submit(old.session, source.ctypes.data, old.address, 4096)
    assert wait_until_ended(old_engine, ticket) is PieceStatus.APPLIED
    old.kill()
    new = start_peer(source.nbytes, session=old.session)
    assert new.session == old.session
    new_engine = start_engine(source)
    ticket = new_engine.submit(new.session, source.ctypes.data, new.address, 4096)
    assert wait_until_ended(new_engine, ticket) is PieceStatus.APPLIED
    assert np.array_equal(new.memory, source)


def test_overlapping_and_empty_regions_are_refused(start_engine: StartEngine) -> None:
    memory = np.zeros(4096, np.uint8)
    engine = start_engine(memory)
    with pytest.raises(RegistrationFailed, match="overlap"):
        engine.register(memory.ctypes.data, 1)
    with pytest.raises(RegistrationFailed, match="empty"):
        engine.register(memory.ctypes.data + 8192, 0)
    with pytest.raises(RegistrationFailed, match="unregister"):
        engine.unregister(memory.ctypes.data + 8192)


def test_the_unacknowledged_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransportMisconfigured, match="MC_TCP_PROTO"):
        MooncakeEngine()


def test_ipv6_in_the_environment_and_an_ipv4_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write would fail: Mooncake speaks one of the two."""
    monkeypatch.setenv("MC_USE_IPV6", "0")  # any value turns it on
    with pytest.raises(TransportMisconfigured, match=r"MC_USE_IPV6 is set.*such as 127\.0\.0\.1"):
        MooncakeEngine()


@pytest.mark.parametrize(
    ("installed", "cause"),
    [
        ({}, "not installed"),
        ({"mooncake-transfer-engine-non-cuda": "0.3.11"}, "0.3.11"),
        ({"mooncake-transfer-engine": "0.3.12"}, "0.3.12.post1"),
        (dict.fromkeys(mooncake.WHEELS, "0.3.13"), "both installed"),
    ],
)
def test_a_wrong_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], cause: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(TransportUnavailable, match=cause):
        mooncake.installed_wheel()


def test_a_missing_system_library_names_the_packages_to_install() -> None:
    script = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("mooncake"):
            raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")
sys.meta_path.insert(0, Missing())
from server.transfer.engines.mooncake import MooncakeEngine
MooncakeEngine()
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "TransportUnavailable" in ran.stderr
    assert "apt-get install libibverbs1 libnuma1 libcurl4" in ran.stderr
