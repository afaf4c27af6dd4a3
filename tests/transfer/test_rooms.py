"""The two state machines, alone and against each other: rooms end, and no write can land in free memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from server.cache.digest import NOTHING, StateParts
from server.decode.room import (
    Commit,
    DecodePhase,
    DecodeRoom,
    FailClient,
    Fenced,
    FencePeer,
    Free,
    Opened,
    Verified,
    Verify,
)
from server.engine.request import TokenLogprob
from server.failure import Failure, FailureKind
from server.prefill.events import (
    Admitted,
    Advanced,
    BatchEnded,
    CacheDamaged,
    CancelEngine,
    CancelPush,
    Clean,
    Cleaned,
    Computed,
    EngineIdle,
    Pushed,
    PushPages,
    PushTail,
    QueueAgain,
    QueueMoved,
    Release,
    SenderGone,
)
from server.prefill.room import PrefillPhase, PrefillRoom, failed_message
from server.transfer.plan import Rows
from server.transfer.protocol import (
    Abort,
    Committed,
    Done,
    Failed,
    Progress,
    Quiesced,
    Rejected,
    RemotePhase,
    Reserved,
    Writes,
    ids_of,
)
from server.transfer.rooms import Deadlines, Forget, GivenUp, Heartbeat, PeerLost, RoomKey, Send, Tick, Tombstones
from tests.transfer.test_protocol import reserve

DEADLINES = Deadlines()
DECODE = "b" * 32
RESERVE = reserve()
IDS = ids_of(RESERVE)
DONE = Done(**IDS, n=3, sent=(), pieces={}, timings=None)  # type: ignore[arg-type]
FIRST = TokenLogprob(1, -0.5)
PARTS = StateParts({"swa": b"8 bytes."}, frozenset())
GONE = Failure("aborted", "the client is gone")


def sent(actions: Sequence[object]) -> list[object]:
    return [action.message for action in actions if isinstance(action, Send)]


def kinds(actions: Sequence[object]) -> list[type]:
    return [type(action.message) if isinstance(action, Send) else type(action) for action in actions]


def decode_room() -> DecodeRoom:
    room = DecodeRoom(RESERVE, DEADLINES, 0.0)
    assert sent(room.handle(Opened(), 0.0)) == [RESERVE]
    return room


def prefill_room(phase: PrefillPhase = PrefillPhase.QUEUED) -> PrefillRoom:
    room = PrefillRoom(RESERVE, 3, DEADLINES, 0.0)
    if phase is not PrefillPhase.QUEUED:
        room.handle(Admitted(), 1.0)
    if phase in (PrefillPhase.TRANSFER, PrefillPhase.COMMIT):
        room.handle(Computed(PARTS, 0.5, 0.1), 2.0)
        room.handle(Pushed(1, (Rows("swa", 0, 3, 96),), {"swa": 4}, last=True), 2.0)
    if phase is PrefillPhase.COMMIT:
        room.handle(BatchEnded(1, None, quiesced=True), 3.0)
    assert room.phase is phase
    return room


class TestDecodeRoom:
    def test_good_way(self) -> None:
        room = decode_room()
        room.handle(Reserved(**IDS), 0.1)
        room.handle(Progress(**IDS, phase=RemotePhase.PREFILL, n_computed=1), 0.2)
        assert kinds(room.handle(DONE, 0.3)) == [Verify]
        assert kinds(room.handle(Verified(FIRST), 0.4)) == [Commit, Committed, Forget]
        assert set(room.phase_s) == {"reserve", "queued", "prefill", "verify"}

    def test_reserve_is_sent_again_with_back_off_until_it_is_answered(self) -> None:
        room = decode_room()
        times = [t / 10 for t in range(1, 60) if sent(room.handle(Tick(), t / 10))]
        assert times == pytest.approx([0.5, 1.5, 3.5], abs=0.11)
        room.handle(Reserved(**IDS), 6.0)
        assert not room.handle(Tick(), 9.0)

    def test_silence_in_each_phase_fails_with_the_phase_s_name(self) -> None:
        for phase in ("reserve", "queued", "prefill", "transfer"):
            room = decode_room()
            if phase != "reserve":
                room.handle(Progress(**IDS, phase=RemotePhase(phase), n_computed=0), 1.0)
            limit_s = getattr(DEADLINES, f"{phase}_s")
            room.handle(Tick(), limit_s)
            actions = room.handle(Tick(), limit_s + 1.1)
            assert kinds(actions) == [FailClient, Abort]
            assert room.failure is not None
            assert (room.failure.code, room.failure.kind) == ("deadline", "deadline")
            assert phase in room.failure.reason

    def test_a_sign_of_life_moves_the_deadline(self) -> None:
        room = decode_room()
        for t in range(1, 500):
            room.handle(Progress(**IDS, phase=RemotePhase.QUEUED, n_computed=0), float(t))
            assert not room.handle(Tick(), t + 0.5)

    def test_memory_is_free_only_after_quiesced(self) -> None:
        room = decode_room()
        assert kinds(room.handle(GivenUp(GONE), 1.0)) == [FailClient, Abort]
        assert kinds(room.handle(Tick(), 2.0)) == [Abort]
        assert kinds(room.handle(DONE, 2.1)) == [Abort], "it is too late"
        assert kinds(room.handle(Quiesced(**IDS), 2.2)) == [Free, Forget]
        assert room.phase is DecodePhase.OVER
        assert room.handle(Quiesced(**IDS), 2.3) == []

    def test_memory_is_not_free_while_it_is_being_checked(self) -> None:
        room = decode_room()
        room.handle(DONE, 1.0)
        room.handle(GivenUp(GONE), 1.1)
        assert room.handle(Quiesced(**IDS), 1.2) == []
        assert kinds(room.handle(Verified(FIRST), 1.3)) == [Free, Forget]

    def test_a_lost_failed_is_waited_for_so_that_the_client_learns_the_reason(self) -> None:
        room = decode_room()
        assert room.handle(Quiesced(**IDS), 1.0) == [], "the Failed before it was lost, and comes again"
        failed = failed_message(RESERVE, Failure("engine_error", "it broke"), Writes.SETTLING)
        assert kinds(room.handle(failed, 1.5)) == [FailClient, Abort, Free, Forget]
        assert room.failure is not None
        assert room.failure.reason == "it broke"

    def test_a_room_that_is_quiesced_without_a_reason_ends_all_the_same(self) -> None:
        room = decode_room()
        room.handle(Quiesced(**IDS), 1.0)
        assert not room.handle(Tick(), 1.0 + DEADLINES.resend_cap_s)
        assert kinds(room.handle(Tick(), 1.1 + DEADLINES.resend_cap_s)) == [FailClient, Abort, Free, Forget]

    def test_an_abort_that_is_not_answered_asks_for_a_fence_once(self) -> None:
        room = decode_room()
        room.handle(GivenUp(GONE), 0.0)
        assert kinds(room.handle(Tick(), DEADLINES.quiesce_s + 1)) == [FencePeer]
        assert FencePeer not in kinds(room.handle(Tick(), DEADLINES.quiesce_s + 2))
        assert room.handle(PeerLost(Failure("fenced", "")), 40.0) == []
        assert kinds(room.handle(Fenced(), 41.0)) == [Free, Forget]

    def test_unknown_writes_ask_for_a_fence_at_once(self) -> None:
        room = decode_room()
        failed = Failed(
            **IDS, code="transfer_failed", reason="lost", kind=FailureKind.PEER, component="swa", writes=Writes.UNKNOWN
        )
        assert kinds(room.handle(failed, 1.0)) == [FailClient, Abort, FencePeer]
        assert room.failure == Failure("transfer_failed", "lost", "swa")

    def test_a_lost_peer_fails_the_client_at_once_and_frees_after_the_fence(self) -> None:
        room = decode_room()
        assert kinds(room.handle(PeerLost(Failure("peer_lost", "silent")), 1.0)) == [FailClient]
        assert room.handle(Tick(), 500.0) == []
        assert kinds(room.handle(Fenced(), 501.0)) == [Free, Forget]

    def test_a_mismatch_is_rejected_by_component(self) -> None:
        room = decode_room()
        room.handle(DONE, 1.0)
        actions = room.handle(Verified(Failure("component_mismatch", "swa: digest", "swa")), 1.1)
        assert kinds(actions) == [Rejected, FailClient, Abort]
        assert sent(actions)[0] == Rejected(**IDS, component="swa", reason="swa: digest")


class TestPrefillRoom:
    def test_good_way(self) -> None:
        room = PrefillRoom(RESERVE, 3, DEADLINES, 0.0)
        assert kinds(room.handle(RESERVE, 0.0)) == [Reserved]
        room.handle(Admitted(), 1.0)
        assert kinds(room.handle(Advanced(2), 1.5)) == [PushPages, Progress]
        room.handle(Pushed(1, (Rows("swa", 0, 2, 64),), {"swa": 1}, last=False), 1.5)
        assert kinds(room.handle(Computed(PARTS, 0.5, 0.1), 2.0)) == [PushTail]
        assert kinds(room.handle(Tick(), 2.05)) == [Progress], "that it is in transfer, if it still is"
        assert room.handle(Tick(), 2.06) == []
        assert room.handle(BatchEnded(1, None, quiesced=True), 2.1) == [], "the tail is still to come"
        room.handle(Pushed(2, (Rows("swa", 2, 3, 32),), {"swa": 3}, last=True), 2.2)
        (done,) = sent(room.handle(BatchEnded(2, None, quiesced=True), 3.0))
        assert isinstance(done, Done)
        (swa,) = done.sent
        assert (swa.start, swa.stop, swa.nbytes, swa.digest, done.pieces) == (
            0,
            3,
            96,
            PARTS.digests()["swa"],
            {"swa": 4},
        )
        assert sent(room.handle(Tick(), 4.0)) == [done], "it is sent again until answered"
        assert kinds(room.handle(Committed(**IDS), 4.1)) == [Clean]
        assert kinds(room.handle(Cleaned(), 4.2)) == [Release, Forget]

    def test_what_the_cache_had_and_what_the_decode_node_has_is_in_done(self) -> None:
        room = PrefillRoom(RESERVE, 3, DEADLINES, 0.0)
        room.handle(Admitted(2), 1.0)
        room.handle(Advanced(2), 1.1)
        room.handle(Pushed(None, (Rows("c4_kv", 0, 64, 0, 512),), {}, last=False, held=((0, 1),)), 1.2)
        parts = StateParts({"swa": b"8 bytes.", "c4_kv": b"held....sent...."}, frozenset({"c4_kv"}))
        room.handle(Computed(parts, 0.5, 0.1), 2.0)
        pushed = (Rows("c4_kv", 64, 65, 8), Rows("swa", 0, 3, 96))
        (done,) = sent(room.handle(Pushed(None, pushed, {}, last=True, held=((0, 1),)), 2.1))
        assert isinstance(done, Done)
        assert (done.n_reused, done.held, done.timings.chunks) == (2, ((0, 1),), 1)
        c4_kv, swa = done.sent
        assert (c4_kv.start, c4_kv.stop, c4_kv.nbytes, c4_kv.held_nbytes) == (0, 65, 8, 512)
        assert (c4_kv.digest, c4_kv.held_digest) == parts.split("c4_kv", ((0, 1),))
        assert (swa.nbytes, swa.held_nbytes, swa.held_digest) == (96, 0, NOTHING)

    def test_a_refused_hit_puts_the_room_into_the_queue_again_and_the_peer_hears_of_no_failure(self) -> None:
        room = PrefillRoom(RESERVE, 3, DEADLINES, 0.0)
        room.handle(Admitted(2), 1.0)
        assert kinds(room.handle(CacheDamaged(), 1.5)) == [QueueAgain]
        assert (room.phase, room.n_reused, room.active) == (PrefillPhase.QUEUED, 0, True)
        room.handle(Admitted(), 1.75)
        room.handle(Computed(PARTS, 0.5, 0.1), 2.0)
        (done,) = sent(room.handle(Pushed(None, (Rows("swa", 0, 3, 96),), {}, last=True), 2.5))
        assert isinstance(done, Done)
        assert done.n_reused == 0
        timings = done.timings
        assert (timings.queued_s, timings.prefill_s, timings.transfer_s) == (1.25, 0.75, 0.5), "both times together"

    def test_in_the_queue_again_its_deadline_counts_anew(self) -> None:
        room = prefill_room(PrefillPhase.PREFILL)
        room.handle(CacheDamaged(), 5.0)
        assert Failed not in kinds(room.handle(Tick(), 4.9 + DEADLINES.queued_s))
        assert kinds(room.handle(Tick(), 5.1 + DEADLINES.queued_s)) == [Failed, Quiesced]

    def test_a_hit_that_is_refused_after_the_end_leaves_memory_to_clean(self) -> None:
        room = prefill_room(PrefillPhase.PREFILL)
        assert kinds(room.handle(Abort(**IDS, reason="bye"), 2.0)) == [CancelEngine]
        assert kinds(room.handle(CacheDamaged(), 2.1)) == [Quiesced, Clean]
        assert kinds(room.handle(Cleaned(), 2.2)) == [Release, Forget]

    def test_done_waits_for_every_batch(self) -> None:
        room = prefill_room(PrefillPhase.PREFILL)
        room.handle(Pushed(1, (Rows("swa", 0, 2, 64),), {"swa": 1}, last=False), 1.5)
        room.handle(Computed(PARTS, 0.5, 0.1), 2.0)
        room.handle(Pushed(2, (Rows("swa", 2, 3, 32),), {"swa": 3}, last=True), 2.2)
        assert room.handle(BatchEnded(2, None, quiesced=False), 2.3) == []
        assert kinds(room.handle(BatchEnded(1, None, quiesced=True), 2.4)) == [Done]

    @pytest.mark.parametrize("quiesced", [True, False])
    def test_what_became_of_the_writes_is_told_after_the_last_batch(self, quiesced: bool) -> None:
        room = prefill_room(PrefillPhase.TRANSFER)
        room.handle(Pushed(2, (Rows("swa", 2, 3, 32),), {"swa": 3}, last=True), 2.2)
        assert room.handle(BatchEnded(1, None, quiesced=False), 2.3) == [], "the other one is under way"
        (told,) = sent(room.handle(GivenUp(Failure("prefill_client_gone", "the client has gone")), 2.4))
        assert isinstance(told, Failed)
        assert told.writes is Writes.SETTLING
        verdict, *_ = sent(room.handle(BatchEnded(2, None, quiesced=quiesced), 2.5))
        if quiesced:
            assert isinstance(verdict, Quiesced)
        else:
            assert isinstance(verdict, Failed)
            assert verdict.writes is Writes.UNKNOWN

    @pytest.mark.parametrize("phase", [p for p in PrefillPhase if p not in ("committed", "ending")])
    def test_an_abort_in_any_phase_ends_quiesced_and_clean(self, phase: PrefillPhase) -> None:
        room = prefill_room(phase)
        actions = room.handle(Abort(**IDS, reason="bye"), 10.0)
        if phase is PrefillPhase.PREFILL:
            assert kinds(actions) == [CancelEngine]
            actions = room.handle(EngineIdle(), 10.1)
        elif phase is PrefillPhase.TRANSFER:
            assert kinds(actions) == [CancelPush]
            actions = room.handle(BatchEnded(1, Failure("transfer_failed", "cancelled"), quiesced=True), 10.1)
        if phase is PrefillPhase.QUEUED:
            assert kinds(actions) == [Quiesced, Forget]
        else:
            assert kinds(actions) == [Quiesced, Clean]
            assert kinds(room.handle(Cleaned(), 10.2)) == [Release, Forget]

    def test_quiesced_is_not_said_while_a_batch_is_under_way(self) -> None:
        room = prefill_room(PrefillPhase.TRANSFER)
        room.handle(Abort(**IDS, reason="bye"), 3.0)
        assert room.handle(Abort(**IDS, reason="bye"), 3.5) == []
        assert room.handle(Tick(), 4.0) == []

    def test_quiesced_is_never_said_after_a_write_of_unknown_fate(self) -> None:
        room = prefill_room(PrefillPhase.TRANSFER)
        actions = room.handle(BatchEnded(1, Failure("transfer_failed", "timed out", "swa"), quiesced=False), 3.0)
        messages = [m for m in sent(actions) if isinstance(m, Failed)]
        assert [m.writes for m in messages] == [Writes.UNKNOWN, Writes.UNKNOWN]
        actions = room.handle(Abort(**IDS, reason="bye"), 3.1)
        assert [m.writes for m in sent(actions)] == [Writes.UNKNOWN]  # type: ignore[attr-defined]
        assert room.handle(Cleaned(), 3.2)[-1] == Forget("failed", "transfer_failed", clean=False)

    def test_a_failure_is_told_at_once_and_again_until_the_abort(self) -> None:
        room = prefill_room(PrefillPhase.PREFILL)
        actions = room.handle(EngineIdle(Failure("engine_error", "boom")), 2.0)
        assert kinds(actions) == [Failed, Quiesced, Clean]
        assert kinds(room.handle(Cleaned(), 2.1)) == [Release]
        assert kinds(room.handle(Tick(), 2.6)) == [Failed]
        assert kinds(room.handle(Abort(**IDS, reason="ok"), 2.7)) == [Quiesced, Forget]

    def test_a_failure_that_is_never_acknowledged_is_forgotten_in_the_end(self) -> None:
        room = prefill_room(PrefillPhase.PREFILL)
        room.handle(EngineIdle(Failure("engine_error", "boom")), 2.0)
        room.handle(Cleaned(), 2.1)
        assert kinds(room.handle(Tick(), 3.0 + DEADLINES.quiesce_s)) == [Forget]

    def test_deadlines_of_the_prefill_node_s_own_phases(self) -> None:
        for phase in (PrefillPhase.QUEUED, PrefillPhase.PREFILL, PrefillPhase.TRANSFER, PrefillPhase.COMMIT):
            room = prefill_room(phase)
            actions = room.handle(Tick(), 4.0 + getattr(DEADLINES, f"{phase}_s"))
            assert kinds(actions)[0] is Failed
            assert room.failure is not None
            assert room.failure.code == "deadline"

    def test_waiting_in_a_moving_queue_is_no_silence(self) -> None:
        room = prefill_room()
        for t in range(0, 600, 10):
            room.handle(QueueMoved(), float(t))
            assert Failed not in kinds(room.handle(Tick(), t + 5.0))

    def test_signs_of_life_are_sent_every_second(self) -> None:
        room = prefill_room()
        times = [t / 10 for t in range(1, 50) if Progress in kinds(room.handle(Tick(), t / 10))]
        assert len(times) == 4

    def test_a_lost_peer_is_told_nothing(self) -> None:
        room = prefill_room(PrefillPhase.TRANSFER)
        assert kinds(room.handle(PeerLost(Failure("peer_lost", "")), 3.0)) == [CancelPush]
        assert kinds(room.handle(SenderGone(), 8.0)) == [Clean]
        assert kinds(room.handle(Cleaned(), 8.1)) == [Release, Forget]

    def test_a_missing_digest_fails_the_room(self) -> None:
        room = prefill_room(PrefillPhase.PREFILL)
        room.handle(Computed(StateParts({}, frozenset()), 0.5, 0.1), 2.0)
        room.handle(Pushed(1, (), {"swa": 1}, last=True), 2.0)
        assert kinds(room.handle(BatchEnded(1, None, quiesced=True), 2.1)) == [Failed, Quiesced, Clean]


def test_a_tombstone_refuses_its_epoch_and_earlier_ones() -> None:
    stones = Tombstones(capacity=2)
    stones.add(RoomKey(5, 2, DECODE), GONE, clean=True)
    assert stones.refuses(RoomKey(5, 1, DECODE)) is not None
    assert stones.refuses(RoomKey(5, 2, DECODE)) is not None
    assert stones.refuses(RoomKey(5, 3, DECODE)) is None
    stones.add(RoomKey(6, 3, DECODE), GONE, clean=False)
    for room in range(10, 20):
        stones.add(RoomKey(room, 4, DECODE), GONE, clean=True)
    assert len(stones) == 2
    assert not stones.clean(RoomKey(6, 3, DECODE)), "a room with unknown writes is never forgotten"
    for room in (5, 10, 17):
        forgotten = stones.refuses(RoomKey(room, 4 if room > 5 else 2, DECODE))
        assert forgotten is not None, "it is over, though its tombstone is gone"
    assert stones.refuses(RoomKey(21, 5, DECODE)) is None
    assert stones.refuses(RoomKey(10, 1, "c" * 32)) is None, "one process cannot crowd out the tombstones of another"
    stones.drop_peer(DECODE)
    assert len(stones) == 0
    assert stones.clean(RoomKey(6, 3, DECODE))
    assert stones.refuses(RoomKey(10, 1, DECODE)) is None


def test_a_process_that_was_stopped_does_not_take_its_own_silence_for_the_peer_s() -> None:
    heartbeat = Heartbeat(3.5, 0.0)
    assert not heartbeat.tick(0.25, 0.25)
    assert not heartbeat.tick(30.0, 0.25), "30 s of our own absence"
    assert not heartbeat.tick(30.25, 0.25)
    ticks = [30.5 + i / 4 for i in range(20)]
    assert [heartbeat.tick(t, 0.25) for t in ticks].index(True) <= 14
