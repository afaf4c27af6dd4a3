"""Rooms on a prefill node with a cache: what is taken over, kept and forgotten, who waits for whom, what is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.cache.layout import Placement
from server.cache.prefix import PrefixHit
from server.cache.specs import Scope
from server.engine.events import Cancel, ComputeFailed, Finished
from server.engine.request import FinishReason
from server.failure import Failure
from server.faults.hooks import Hooks, Sending
from server.prefill.events import QueueMoved
from server.prefill.room import PrefillPhase
from server.transfer.checks import Check
from server.transfer.protocol import Failed, Quiesced
from server.transfer.rooms import RoomKey
from tests.prefill.support import Prefills, prompt_of
from tests.transfer.support import PAGE_SIZE


def hit_of(prefills: Prefills, key: RoomKey) -> int:
    """Pages that the engine need not compute."""
    command = prefills.command(key)
    n = 0 if command.hit is None else command.hit.n
    assert command.placement.read_only * PAGE_SIZE == n
    return n // PAGE_SIZE


async def test_a_prompt_is_computed_on_from_what_an_earlier_one_left() -> None:
    prefills = Prefills()
    first = prefills.reserve("abc.")
    assert [point.n // PAGE_SIZE for point in prefills.command(first).snapshots_at] == [3]
    prefills.whole(first)
    assert prefills.counts() == {"free": 13, "cached": 3}
    second = prefills.reserve("abcde.")
    assert hit_of(prefills, second) == 3
    assert prefills.counts() == {"free": 10, "shared": 3, "reserved": 3}
    done = prefills.whole(second)
    assert done.n_reused == 3 * PAGE_SIZE
    assert prefills.counts() == {"free": 11, "cached": 5}
    assert prefills.metrics.registry.get_sample_value("pd_prefix_reused_tokens_total") == 3 * PAGE_SIZE
    assert hit_of(prefills, prefills.reserve("abcde.")) == 5


async def test_the_first_report_of_a_hit_is_no_chunk() -> None:
    prefills = Prefills()
    prefills.whole(prefills.reserve("ab."))
    second = prefills.reserve("abc.")
    prefills.compute(second, 2)
    assert prefills.whole(second).timings.chunks == 2, "to the boundary of the snapshot, and to the end"


async def test_one_token_at_least_is_computed() -> None:
    prefills = Prefills()
    prefills.whole(prefills.reserve("ab"))
    assert hit_of(prefills, prefills.reserve("ab")) == 1


async def test_other_tenants_and_prompts_of_which_the_log_probabilities_are_wanted_find_nothing() -> None:
    prefills = Prefills()
    prefills.whole(prefills.reserve("ab."))
    assert hit_of(prefills, prefills.reserve("ab.", salt="other")) == 0
    assert hit_of(prefills, prefills.reserve("ab.", n_top=0)) == 0
    assert hit_of(prefills, prefills.reserve("ab.")) == 2


async def test_pages_stay_pinned_until_the_room_s_memory_is_free() -> None:
    prefills = Prefills(pages=5)
    prefills.whole(prefills.reserve("ab."))
    second = prefills.reserve("abc")
    prefills.abort(second)
    assert prefills.counts() == {"free": 1, "shared": 2, "reserved": 1}, "the engine may be reading"
    waiting = prefills.reserve("wxyz")
    assert waiting not in prefills.prefills()
    prefills.event(Finished(second, FinishReason.ABORT))
    prefills.scrubbed()
    assert waiting in prefills.prefills(), "what is cached makes room"
    assert prefills.counts() == {"reserved": 4}
    assert len(prefills.cache) == 0


async def test_pages_of_a_room_that_is_aborted_are_kept_as_far_as_they_were_complete() -> None:
    prefills = Prefills()
    first = prefills.reserve("abc.")
    prefills.compute(first, 2)
    prefills.abort(first)
    prefills.event(Finished(first, FinishReason.ABORT))
    prefills.scrubbed()
    assert prefills.counts() == {"free": 12, "shared": 2, "reserved": 2}, "they are still being sent"
    prefills.applied()
    prefills.scrubbed()
    assert prefills.counts() == {"free": 14, "cached": 2}
    assert [point.n // PAGE_SIZE for point in prefills.command(prefills.reserve("abx.")).snapshots_at] == [2, 3]


# --- waiting ----------------------------------------------------------------------------------------------------------


async def test_a_room_waits_for_the_first_one_s_pages_and_those_behind_it_go_first() -> None:
    prefills = Prefills()
    first, second, other = (prefills.reserve(text) for text in ("abc.", "abcd.", "x."))
    assert prefills.prefills() == [first, other]
    prefills.snapshots(first)
    assert prefills.prefills() == [first, other, second]
    assert hit_of(prefills, second) == 3


async def test_rooms_that_wait_together_go_on_together() -> None:
    prefills = Prefills()
    first, *others = [prefills.reserve("ab." + "." * i) for i in range(4)]
    assert prefills.prefills() == [first]
    prefills.snapshots(first)
    assert prefills.prefills() == [first, *others]
    assert {hit_of(prefills, key) for key in others} == {2}


@pytest.mark.parametrize("how", ["abort", "engine", "deadline", "finished"])
async def test_if_the_first_ends_without_its_snapshot_the_second_goes_on_alone(how: str) -> None:
    prefills = Prefills()
    first, second = prefills.reserve("abc."), prefills.reserve("abcd.")
    match how:
        case "abort":
            prefills.abort(first)
        case "engine":
            prefills.event(ComputeFailed(first, Failure("engine_error", "boom")))
        case "deadline":
            prefills.now = 1e4
            prefills.manager.step(prefills.manager.reqs[second], QueueMoved())
        case _:
            prefills.finish(first)
    prefills.manager.tick()
    assert prefills.prefills() == [first, second]
    assert hit_of(prefills, second) == 0
    assert prefills.manager.reqs[second].room.phase is PrefillPhase.PREFILL


async def test_the_deadline_of_a_room_that_waits_counts() -> None:
    prefills = Prefills()
    first, second = prefills.reserve("abc."), prefills.reserve("abcd.")
    prefills.now = 1e4
    prefills.manager.tick()
    failed = {m.room: m.code for m in prefills.sent if isinstance(m, Failed)}
    assert failed == {first.room: "deadline", second.room: "deadline"}


async def test_of_those_that_waited_one_goes_on_and_the_others_wait_for_it() -> None:
    prefills = Prefills()
    first, second, third = (prefills.reserve("abc" + "." * i) for i in (1, 2, 3))
    prefills.abort(first)
    prefills.manager.tick()
    assert prefills.prefills() == [first, second]
    prefills.snapshots(second)
    assert prefills.prefills() == [first, second, third]
    assert hit_of(prefills, third) == 3


async def test_nobody_waits_for_snapshots_that_are_not_kept() -> None:
    prefills = Prefills(snapshot_nbytes=1)
    keys = [prefills.reserve("abc" + "." * i) for i in range(1, 4)]
    prefills.snapshots(keys[0])
    assert prefills.prefills() == keys


async def test_where_rooms_part_that_are_in_the_queue_a_snapshot_is_wanted() -> None:
    prefills = Prefills(slots=2)
    running = prefills.reserve("x.")
    first, second = prefills.reserve("abcd."), prefills.reserve("abyz.")
    prefills.whole(running)
    assert [point.n // PAGE_SIZE for point in prefills.command(first).snapshots_at] == [2, 4]
    prefills.whole(first)
    assert hit_of(prefills, second) == 2


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [None, 1])
async def test_a_refused_hit_is_computed_anew_at_once(page: int | None) -> None:
    prefills = Prefills(slots=2)
    prefills.whole(prefills.reserve("abc."))
    room = prefills.reserve("abcd.")
    behind = prefills.reserve("x.")
    prefills.now = 1.0
    prefills.refuse(room, page)
    assert prefills.prefills()[-2:] == [room, room]
    assert hit_of(prefills, room) == 0
    assert prefills.counts()["reserved"] == 5
    assert behind not in prefills.prefills()
    assert not any(isinstance(message, Failed) for message in prefills.sent)
    assert len(prefills.cache) == (3 if page is None else 1)
    assert not list(prefills.cache.snapshots)
    assert (
        prefills.metrics.registry.get_sample_value("pd_check_failures_total", {"check": "hit", "component": ""}) == 1.0
    )
    record = prefills.manager.reqs[room].record.read()
    assert [attempt.failure and attempt.failure.code for attempt in record.attempts] == ["prefix_damaged", None]
    done = prefills.whole(room)
    assert done.n_reused == 0
    assert done.timings.prefill_s == 1.0


class Stale(Hooks):
    """What is taken from the cache is the snapshot of another prefix; those that are kept are right."""

    def cache_hit(self, key: object, hit: PrefixHit) -> PrefixHit:
        return replace(hit, snapshot=replace(hit.snapshot, key=bytes(16)))


async def test_a_room_whose_hit_was_refused_gets_nothing_more_from_the_cache_though_there_is_something() -> None:
    prefills = Prefills(hooks=Stale())
    prefills.whole(prefills.reserve("abc."))
    room = prefills.reserve("abcd.")
    assert hit_of(prefills, room) == 3
    prefills.refuse(room, None)
    assert hit_of(prefills, room) == 0
    assert len(list(prefills.cache.snapshots)) == 1, "this one is not damaged"


async def test_damage_that_is_known_already_drops_nothing_new() -> None:
    prefills = Prefills()
    prefills.whole(prefills.reserve("abc."))
    first, second = prefills.reserve("abc.d"), prefills.reserve("abc.e")
    prefills.refuse(first, 0)
    prefills.snapshots(first)
    assert len(prefills.cache) == 4
    prefills.refuse(second, 0)
    assert len(prefills.cache) == 4
    assert prefills.cache.counts.damaged == 1


async def test_a_hit_refused_after_the_abort_is_an_idle_engine() -> None:
    prefills = Prefills()
    prefills.whole(prefills.reserve("abc."))
    room = prefills.reserve("abcd.")
    prefills.abort(room)
    assert prefills.commands[-1] == Cancel(room)
    prefills.refuse(room, 2)
    prefills.scrubbed()
    assert isinstance(prefills.sent[-1], Quiesced)
    assert prefills.counts() == {"free": 14, "cached": 2}


class Elsewhere(Hooks):
    """A room is computed into other memory than it has."""

    def sending(self, key: object, n: int, placement: Placement) -> Sending:
        return Sending(Placement(placement.slot, placement.pages))


async def test_nothing_is_kept_of_a_room_that_is_computed_elsewhere() -> None:
    prefills = Prefills(hooks=Elsewhere())
    prefills.whole(prefills.reserve("abc."))
    assert len(prefills.cache) == 0
    assert prefills.counts() == {"free": 16}


async def test_a_room_that_is_to_be_computed_elsewhere_takes_nothing_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks = Hooks()
    prefills = Prefills(hooks=hooks)
    prefills.whole(prefills.reserve("abc."))
    monkeypatch.setattr(hooks, "cache_hit", lambda key, hit: None)
    assert hit_of(prefills, prefills.reserve("abcd.")) == 0


class Unchecked(Hooks):
    def sending(self, key: object, n: int, placement: Placement) -> Sending:
        return Sending(placement, skipped=frozenset({Check.HIT}))


async def test_the_engine_is_told_not_to_check() -> None:
    assert (prefills := Prefills()).command(prefills.reserve("a.")).hit_is_checked
    prefills = Prefills(hooks=Unchecked())
    assert not prefills.command(prefills.reserve("a.")).hit_is_checked


# --- sending ----------------------------------------------------------------------------------------------------------


async def test_pages_that_the_decode_node_has_are_not_sent_and_are_claimed_as_held() -> None:
    prefills = Prefills()
    prefills.whole(prefills.reserve("abc."))
    digests = [page.digest for page in prefills.cache.match(prefills.cache.keys_of(prompt_of("abc")))]
    room = prefills.reserve("abcd.", offered=digests[0] + bytes(8) + digests[2])
    prefills.compute(room, 3)
    (job,) = prefills.sender.jobs
    assert sum(piece.nbytes for piece in job.pieces) == prefills.arena.layout.page_nbytes
    done = prefills.whole(room)
    assert done.held == ((0, 1), (2, 3))
    live = prefills.arena.layout.live_nbytes(len(prompt_of("abcd.")))
    assert {sent.component: sent.nbytes + sent.held_nbytes for sent in done.sent} == live
    for sent in done.sent:
        component = prefills.arena.layout.component(sent.component)
        expected = 2 * component.rows * component.row_nbytes if component.scope is Scope.PAGE else 0
        assert sent.held_nbytes == expected


async def test_the_digests_of_sent_and_of_held_pages_are_apart() -> None:
    prefills = Prefills()
    prefills.whole(prefills.reserve("abc."))
    digests = [page.digest for page in prefills.cache.match(prefills.cache.keys_of(prompt_of("abc")))]
    room = prefills.reserve("abc.", offered=digests[0])
    done = prefills.whole(room)
    assert done.held == ((0, 1),)
    for sent in done.sent:
        assert (sent.digest, sent.held_digest) == prefills.parts[room].split(sent.component, ((0, 1),))


@pytest.mark.parametrize("offered", [bytes(7), bytes(32)])
async def test_an_offer_that_cannot_be_one_is_refused(offered: bytes) -> None:
    prefills = Prefills()
    prefills.reserve("abc.", offered=offered)
    (failed,) = [message for message in prefills.sent if isinstance(message, Failed)]
    assert failed.code == "bad_reserve"
