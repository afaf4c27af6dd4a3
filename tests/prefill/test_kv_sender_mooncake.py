"""The sender thread over real Mooncake: many pieces, bad addresses, peers that die and peers that freeze."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from server.prefill.kv_sender import KVSender, Piece, SendOutcome
from server.transfer.engines.mooncake import MooncakeEngine
from tests.transfer_engines.support import MIB, Bytes, PeerProcess, Results, make_job, random_bytes

pytestmark = pytest.mark.processes

StartPeer = Callable[..., PeerProcess]
StartSender = Callable[[Bytes, str], KVSender]


@pytest.fixture
def start_sender(results: Results) -> Iterator[StartSender]:
    senders: list[KVSender] = []

    def start(source: Bytes, session: str) -> KVSender:
        def build() -> MooncakeEngine:
            engine = MooncakeEngine(transport="tcp")
            engine.register(source.ctypes.data, source.nbytes)
            return engine

        senders.append(KVSender(build, session, results, f"send-{session}"))
        senders[-1].start()
        return senders[-1]

    yield start
    for sender in senders:
        assert sender.close(1.0)


def cut(source: Bytes, address: int, nbytes: int, component: str = "swa") -> list[Piece]:
    return [
        Piece(component, source.ctypes.data + start, address + start, nbytes)
        for start in range(0, source.nbytes, nbytes)
    ]


def test_three_thousand_pieces_are_applied(start_sender: StartSender, start_peer: StartPeer, results: Results) -> None:
    """As one batch call they fail and go on writing: the queue of the transport is shorter."""
    source = random_bytes(3000 * 1024)
    peer = start_peer(source.nbytes)
    start_sender(source, peer.session).send(make_job(cut(source, peer.address, 1024)))
    result = results.next()
    assert (result.outcome, result.pieces, result.quiesced) == (SendOutcome.APPLIED, 3000, True)
    assert np.array_equal(peer.memory, source)


def test_a_bad_address_is_refused_by_component_and_the_room_is_quiesced(
    start_sender: StartSender, start_peer: StartPeer, results: Results
) -> None:
    source = random_bytes(16 * 4096)
    peer = start_peer(source.nbytes)
    pieces = cut(source, peer.address, 4096)
    pieces[5] = Piece("c128_state", source.ctypes.data, peer.address + source.nbytes, 4096)
    sender = start_sender(source, peer.session)
    sender.send(make_job(pieces))
    result = results.next()
    assert (result.outcome, result.quiesced) == (SendOutcome.REFUSED, True)
    assert result.reason.startswith("c128_state: ")
    assert result.nbytes == {"swa": 15 * 4096}
    expected = source.copy()
    expected[5 * 4096 : 6 * 4096] = 0
    assert np.array_equal(peer.memory, expected)
    sender.send(make_job(cut(source, peer.address, 4096), key="next room"))
    assert results.next().outcome is SendOutcome.APPLIED


def test_a_killed_peer_makes_the_room_unknown_at_once(
    start_sender: StartSender, start_peer: StartPeer, results: Results
) -> None:
    source = np.full(256 * MIB, 7, np.uint8)
    peer = start_peer(source.nbytes)
    sender = start_sender(source, peer.session)
    for batch_id in range(50):
        sender.send(make_job(cut(source, peer.address, 32 * MIB), batch_id=batch_id))
        while not peer.memory[0]:
            time.sleep(1e-4)
        peer.freeze()
        if not peer.memory[-1]:
            break
        peer.thaw()  # it was written before this process had its turn: once more
        assert results.next().outcome is SendOutcome.APPLIED
        peer.memory[:] = 0
    peer.kill()
    killed = time.monotonic()
    result = results.next()
    assert time.monotonic() - killed < 10.0  # 10 ms on an idle machine
    assert (result.outcome, result.quiesced) == (SendOutcome.UNKNOWN, False)
    assert "connection lost" in result.reason


def test_a_frozen_peer_meets_the_deadline_and_applies_later(
    start_sender: StartSender, start_peer: StartPeer, results: Results
) -> None:
    source = random_bytes(32 * MIB)
    peer = start_peer(source.nbytes)
    sender = start_sender(source, peer.session)
    sender.send(make_job(cut(source[:64], peer.address, 64), key="warm"))
    assert results.next().outcome is SendOutcome.APPLIED
    peer.freeze()
    started = time.monotonic()
    sender.send(make_job(cut(source, peer.address, 8 * MIB), timeout_s=0.3))
    result = results.next()
    assert 0.3 <= time.monotonic() - started < 10.0
    assert (result.outcome, result.quiesced) == (SendOutcome.UNKNOWN, False)
    assert "deadline" in result.reason
    assert not np.array_equal(peer.memory, source)
    peer.thaw()
    deadline = time.monotonic() + 30.0
    while not np.array_equal(peer.memory, source) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert np.array_equal(peer.memory, source)
    assert results.none_for(0.05), "a batch has one result"
    sender.send(make_job(cut(source[:64], peer.address, 64), batch_id=1))
    assert results.next().quiesced, "the late pieces were polled to their end"
