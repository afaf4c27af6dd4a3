"""The sender thread over the loopback engine: one result a batch, ``quiesced`` only when nothing can write any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from server.prefill.kv_sender import KVSender, Piece, SenderClosed, SendOutcome, SendResult
from server.transfer.engines.base import PieceStatus, Ticket
from server.transfer.engines.loopback import LoopbackEngine, PieceFate, Submission
from tests.transfer_engines.support import Results, eventually, make_job, random_bytes

NBYTES = 64
N_PIECES = 400


class Link:
    """A sender, the receiver's memory, and faults by the offset of a piece in it."""

    def __init__(self, results: Results, max_in_flight: int = 256) -> None:
        self.source = random_bytes(NBYTES * N_PIECES)
        self.target = np.zeros(NBYTES * N_PIECES, np.uint8)
        self.fates: dict[int, PieceFate] = {}
        self.receiver = LoopbackEngine()
        self.receiver.register(self.target.ctypes.data, self.target.nbytes)
        self.engine = LoopbackEngine(fate_of=self.fate_of)
        self.sender = KVSender(
            lambda: self.engine, self.receiver.session, results, "test-sender", max_in_flight=max_in_flight
        )
        self.sender.start()

    def fate_of(self, submission: Submission) -> PieceFate | None:
        return self.fates.get((submission.dst - self.target.ctypes.data) // NBYTES)

    def pieces(self, first: int, count: int, component: str = "swa") -> list[Piece]:
        source, target = self.source.ctypes.data, self.target.ctypes.data
        return [Piece(component, source + i * NBYTES, target + i * NBYTES, NBYTES) for i in range(first, first + count)]

    def applied(self) -> list[int]:
        rows = (self.target == self.source).reshape(N_PIECES, NBYTES)
        return np.flatnonzero(rows.all(axis=1)).tolist()


@pytest.fixture
def link(results: Results) -> Iterator[Link]:
    link = Link(results)
    yield link
    assert link.sender.close(30.0)


def test_every_piece_is_applied_and_counted_by_component(link: Link, results: Results) -> None:
    link.sender.send(make_job(link.pieces(0, 300) + link.pieces(300, 100, "handoff"), batch_id=7))
    result = results.next()
    assert (result.key, result.batch_id, result.outcome, result.reason) == ("room", 7, SendOutcome.APPLIED, "")
    assert result.nbytes == {"swa": 300 * NBYTES, "handoff": 100 * NBYTES}
    assert result.pieces == 400
    assert result.quiesced
    assert link.applied() == list(range(400))


def test_a_batch_without_pieces_is_applied(link: Link, results: Results) -> None:
    link.sender.send(make_job([]))
    assert results.next().outcome is SendOutcome.APPLIED


def test_no_more_pieces_are_in_flight_than_allowed(results: Results) -> None:
    link = Link(results, max_in_flight=10)
    link.fates = dict.fromkeys(range(N_PIECES), PieceFate.HANG)
    link.sender.send(make_job(link.pieces(0, N_PIECES)))
    eventually(lambda: link.engine.submitted >= 10)
    time.sleep(0.1)
    assert link.engine.submitted == 10
    link.engine.release()
    assert results.next().pieces == N_PIECES
    assert link.sender.close(30.0)


def test_a_refused_piece_fails_its_batch_by_component_and_leaves_it_quiesced(link: Link, results: Results) -> None:
    link.fates[3] = PieceFate.REFUSE
    link.sender.send(make_job(link.pieces(0, 16, "c128_state")))
    result = results.next()
    assert result.outcome is SendOutcome.REFUSED
    assert result.reason.startswith("c128_state: ")
    assert result.nbytes == {"c128_state": 15 * NBYTES}
    assert result.quiesced
    assert link.applied() == [i for i in range(16) if i != 3]


@pytest.mark.parametrize("fate", [PieceFate.LOSE, PieceFate.LAND_LATE])
def test_a_lost_piece_makes_its_room_unquiesced_for_good(link: Link, results: Results, fate: PieceFate) -> None:
    link.fates[3] = fate
    link.sender.send(make_job(link.pieces(0, 16)))
    result = results.next()
    assert (result.outcome, result.quiesced) == (SendOutcome.UNKNOWN, False)
    link.sender.send(make_job(link.pieces(16, 16), batch_id=1))
    assert not results.next().quiesced
    link.sender.send(make_job(link.pieces(32, 16), key="another room"))
    assert results.next().quiesced
    link.sender.forget("room")
    link.sender.send(make_job(link.pieces(48, 16), batch_id=2))
    assert results.next().quiesced


def test_a_cancel_stops_the_next_piece_even_of_a_small_batch(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it would go in one turn; the cancel comes while the third piece is handed over."""
    submit, n_submitted = link.engine.submit, 0

    def cancelling(session: str, src: int, dst: int, nbytes: int) -> Ticket:
        nonlocal n_submitted
        n_submitted += 1
        if n_submitted == 3:
            link.sender.cancel("room")
        return submit(session, src, dst, nbytes)

    monkeypatch.setattr(link.engine, "submit", cancelling)
    link.sender.send(make_job(link.pieces(0, 16)))
    result = results.next()
    assert (result.outcome, result.pieces, result.quiesced) == (SendOutcome.CANCELLED, 3, True)
    assert link.applied() == [0, 1, 2]


def test_rooms_that_are_over_are_not_remembered(link: Link, results: Results) -> None:
    link.fates = {1: PieceFate.REFUSE, 2: PieceFate.HANG}
    for i in range(4):
        link.sender.send(make_job(link.pieces(i, 1), key=f"room {i}", timeout_s=0.1))
    outcomes = {result.key: result.outcome for result in (results.next() for _ in range(4))}
    assert outcomes["room 2"] is SendOutcome.UNKNOWN
    link.engine.release()
    eventually(lambda: link.sender.n_rooms == 0)


def test_a_lost_piece_outweighs_a_refused_one(link: Link, results: Results) -> None:
    link.fates = {3: PieceFate.REFUSE, 4: PieceFate.LOSE}
    link.sender.send(make_job(link.pieces(0, 16)))
    result = results.next()
    assert (result.outcome, result.quiesced) == (SendOutcome.UNKNOWN, False)


def test_batches_go_on_beside_one_that_hangs(link: Link, results: Results) -> None:
    link.fates[0] = PieceFate.HANG
    link.sender.send(make_job(link.pieces(0, 1), key="stuck"))
    link.sender.send(make_job(link.pieces(1, 50), key="other"))
    result = results.next()
    assert (result.key, result.outcome, result.quiesced) == ("other", SendOutcome.APPLIED, True)
    link.engine.release()


def test_the_deadline_answers_at_once_and_the_pieces_are_polled_to_their_end(link: Link, results: Results) -> None:
    link.fates[5] = PieceFate.HANG
    started = time.monotonic()
    link.sender.send(make_job(link.pieces(0, 16), timeout_s=0.1))
    result = results.next()
    assert time.monotonic() - started < 10.0
    assert (result.outcome, result.quiesced) == (SendOutcome.UNKNOWN, False)
    assert "deadline" in result.reason
    assert "1 pieces in flight" in result.reason
    link.engine.release()
    assert results.none_for(0.1), "a batch has one result"
    assert link.applied() == list(range(16))
    link.sender.send(make_job(link.pieces(16, 1), batch_id=1))
    assert results.next().quiesced, "the late piece ended applied"


def test_a_deadline_with_nothing_in_flight_is_quiesced(link: Link, results: Results) -> None:
    link.sender.send(make_job(link.pieces(0, 1), timeout_s=-1.0))
    link.sender.send(make_job(link.pieces(1, 1), key="other"))
    by_key = {result.key: result for result in (results.next(), results.next())}
    assert by_key["room"].quiesced
    assert by_key["other"].outcome is SendOutcome.APPLIED


def test_cancel_drops_what_is_not_submitted_and_waits_for_what_is(results: Results) -> None:
    link = Link(results, max_in_flight=4)
    link.fates = dict.fromkeys(range(4), PieceFate.HANG)
    link.sender.send(make_job(link.pieces(0, 100)))
    eventually(lambda: link.engine.submitted == 4)
    link.sender.cancel("room")
    assert results.none_for(0.1), "four pieces are still in flight"
    link.engine.release()
    result = results.next()
    assert (result.outcome, result.quiesced, result.pieces) == (SendOutcome.CANCELLED, True, 4)
    assert link.applied() == [0, 1, 2, 3]
    assert link.sender.close(30.0)


def test_cancel_of_one_room_leaves_the_others(results: Results) -> None:
    link = Link(results, max_in_flight=4)
    link.fates = dict.fromkeys(range(4), PieceFate.HANG)
    for i, key in enumerate(("first", "second", "third")):
        link.sender.send(make_job(link.pieces(100 * i, 100), key=key))
    link.sender.cancel("second")
    link.sender.cancel("never heard of")
    assert results.next().key == "second"
    link.engine.release()
    assert {results.next().key, results.next().key} == {"first", "third"}
    assert link.applied() == [*range(100), *range(200, 300)]
    assert link.sender.close(30.0)


def test_a_cancelled_room_with_a_lost_piece_is_not_quiesced(link: Link, results: Results) -> None:
    link.fates = {0: PieceFate.LOSE, 1: PieceFate.HANG}
    link.sender.send(make_job(link.pieces(0, 1), batch_id=0))
    link.sender.send(make_job(link.pieces(1, 1), batch_id=1))
    assert results.next().batch_id == 0
    link.sender.cancel("room")
    link.engine.release()
    result = results.next()
    assert (result.batch_id, result.outcome, result.quiesced) == (1, SendOutcome.CANCELLED, False)


def test_a_result_is_not_quiesced_while_another_batch_of_the_room_runs(link: Link, results: Results) -> None:
    link.fates[0] = PieceFate.HANG
    link.sender.send(make_job(link.pieces(0, 1), batch_id=0))
    link.sender.send(make_job(link.pieces(1, 1), batch_id=1))
    result = results.next()
    assert (result.batch_id, result.outcome, result.quiesced) == (1, SendOutcome.APPLIED, False)
    link.engine.release()
    assert results.next().quiesced


def test_an_exception_in_one_batch_fails_that_batch_alone(link: Link, results: Results) -> None:
    link.fates[0] = PieceFate.RAISE
    link.sender.send(make_job(link.pieces(0, 4), key="bad"))
    result = results.next()
    assert (result.key, result.outcome, result.quiesced) == ("bad", SendOutcome.UNKNOWN, False)
    assert "injected" in result.reason
    link.sender.send(make_job(link.pieces(4, 4), key="good"))
    assert results.next().outcome is SendOutcome.APPLIED


def test_an_exception_while_polling_is_an_unknown_piece(
    link: Link, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:

        def poll(ticket: Ticket) -> PieceStatus:
            raise RuntimeError("poll is broken")

        patched.setattr(link.engine, "poll", poll)
        link.sender.send(make_job(link.pieces(0, 4)))
        result = results.next()
    assert (result.outcome, result.quiesced) == (SendOutcome.UNKNOWN, False)
    link.sender.send(make_job(link.pieces(4, 4), key="good"))
    assert results.next().outcome is SendOutcome.APPLIED


def test_a_piece_without_bytes_is_refused(link: Link, results: Results) -> None:
    link.sender.send(make_job([Piece("swa", link.source.ctypes.data, link.target.ctypes.data, 0)]))
    result = results.next()
    assert (result.outcome, result.quiesced) == (SendOutcome.REFUSED, True)
    assert "at least one byte" in result.reason


def test_an_engine_that_cannot_be_built_fails_the_batch_and_is_tried_again(results: Results) -> None:
    source, target = random_bytes(NBYTES), np.zeros(NBYTES, np.uint8)
    receiver = LoopbackEngine()
    receiver.register(target.ctypes.data, NBYTES)
    attempts = 0

    def build() -> LoopbackEngine:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise OSError("no card")
        return LoopbackEngine()

    sender = KVSender(build, receiver.session, results, "test-sender")
    sender.start()
    pieces = [Piece("swa", source.ctypes.data, target.ctypes.data, NBYTES)] * 2
    sender.send(make_job(pieces))
    first = results.next()
    assert (first.outcome, first.quiesced) == (SendOutcome.REFUSED, True)
    assert "no card" in first.reason
    sender.send(make_job(pieces))
    assert results.next().outcome is SendOutcome.APPLIED
    assert sender.close(30.0)


def test_a_receiver_of_results_that_raises_does_not_end_the_thread() -> None:
    link_results: list[SendResult] = []
    is_done = threading.Event()

    def on_result(result: SendResult) -> None:
        link_results.append(result)
        if len(link_results) == 1:
            raise ValueError("cannot take it")
        is_done.set()

    receiver = LoopbackEngine()
    sender = KVSender(LoopbackEngine, receiver.session, on_result, "test-sender")
    sender.start()
    sender.send(make_job([], batch_id=0))
    sender.send(make_job([], batch_id=1))
    assert is_done.wait(30.0)
    assert [result.batch_id for result in link_results] == [0, 1]
    assert sender.close(30.0)


def test_close_ends_every_batch_and_takes_no_more(results: Results) -> None:
    link = Link(results, max_in_flight=4)
    link.fates = dict.fromkeys(range(4), PieceFate.HANG)
    link.sender.send(make_job(link.pieces(0, 100), key="stuck"))
    link.sender.send(make_job(link.pieces(100, 100), key="waiting"))
    eventually(lambda: link.engine.submitted == 4)
    assert link.sender.close(0.2)
    by_key = {result.key: result for result in (results.next(), results.next())}
    assert (by_key["waiting"].outcome, by_key["waiting"].quiesced) == (SendOutcome.CANCELLED, True)
    assert (by_key["stuck"].outcome, by_key["stuck"].quiesced) == (SendOutcome.UNKNOWN, False)
    assert results.none_for(0.05)
    with pytest.raises(SenderClosed):
        link.sender.send(make_job(link.pieces(0, 1)))


def test_waiting_for_a_piece_does_not_burn_a_core(link: Link, results: Results) -> None:
    link.fates[0] = PieceFate.HANG
    link.sender.send(make_job(link.pieces(0, 1)))
    eventually(lambda: link.engine.submitted == 1)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.15
    link.engine.release()
    assert results.next().quiesced
