from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cache.allocator import Allocator, AllocatorError, ItemState
from server.cache.layout import Placement
from tests.transfer.support import make_geometry

NOTHING = {state.value: 0 for state in ItemState}


def test_all_or_nothing() -> None:
    allocator = Allocator(make_geometry(pages=9, slots=3))
    assert allocator.reserve("a", 7 * 256) is not None
    assert allocator.reserve("b", 2 * 256) is None
    assert allocator.counts()["slots"]["free"] == 1
    assert allocator.reserve("b", 256) is not None
    assert allocator.reserve("c", 1) is None


def test_item_zero_is_never_handed_out() -> None:
    allocator = Allocator(make_geometry(pages=9), permute_seed=3)
    for owner in range(4):
        placement = allocator.reserve(owner, 512)
        assert placement is not None
        assert placement.slot != 0
        assert 0 not in placement.pages


def test_pages_come_ascending_unless_permuted() -> None:
    straight, shuffled = (Allocator(make_geometry(pages=9), permute_seed=seed) for seed in (None, 1))
    a, b = straight.reserve("x", 8 * 256), shuffled.reserve("x", 8 * 256)
    assert a is not None
    assert b is not None
    assert list(a.pages) == sorted(a.pages)
    assert list(b.pages) != sorted(b.pages)


def test_states_of_a_life() -> None:
    allocator = Allocator(make_geometry(pages=9))
    allocator.reserve("a", 300)
    assert allocator.counts()["pages"] == NOTHING | {"free": 6, "reserved": 2}
    allocator.commit("a")
    assert allocator.counts()["slots"]["committed"] == 1
    allocator.release("a")
    allocator.reserve("b", 300)
    allocator.quarantine("b")
    assert allocator.counts()["slots"]["quarantined"] == 1
    allocator.release("b")
    assert allocator.counts()["pages"] == NOTHING | {"free": 8}


def test_steps_that_no_life_has_are_refused() -> None:
    allocator = Allocator(make_geometry(pages=9))
    with pytest.raises(AllocatorError, match="a holds no slot"):
        allocator.release("a")
    allocator.reserve("a", 1)
    with pytest.raises(AllocatorError, match="already holds"):
        allocator.reserve("a", 1)
    allocator.quarantine("a")
    with pytest.raises(AllocatorError, match="is quarantined, expected reserved"):
        allocator.commit("a")
    allocator.release("a")
    with pytest.raises(AllocatorError):
        allocator.release("a")


@given(
    st.lists(st.tuples(st.sampled_from(["reserve", "release", "commit", "quarantine"]), st.integers(0, 5)), max_size=60)
)
def test_nothing_is_lost_or_owned_twice(steps: list[tuple[str, int]]) -> None:
    allocator = Allocator(make_geometry(pages=9), permute_seed=0)
    for name, owner in steps:
        try:
            if name == "reserve":
                allocator.reserve(owner, 1 + 200 * owner)
            else:
                getattr(allocator, name)(owner)
        except AllocatorError:
            pass
        counts = allocator.counts()
        assert sum(counts["slots"].values()) == 4
        assert sum(counts["pages"].values()) == 8
        held = [allocator.placement_of(o) for o in range(6) if allocator.state_of(o) != "free"]
        pages = [page for placement in held for page in placement.pages]
        assert len(set(pages)) == len(pages)
        assert len({placement.slot for placement in held}) == len(held)


def test_what_becomes_free_is_told_before_anybody_gets_it() -> None:
    told: list[Placement] = []
    allocator = Allocator(make_geometry(pages=9, slots=2), on_free=told.append)
    placement = allocator.reserve("a", 700)
    assert placement is not None
    allocator.release("a")
    assert told == [Placement(placement.slot, placement.pages)]


def test_a_page_of_the_cache_has_readers_and_no_owner() -> None:
    told: list[Placement] = []
    unread: list[int] = []
    allocator = Allocator(make_geometry(pages=9), on_free=told.append)
    allocator.on_unread = unread.extend
    allocator.reserve("a", 3 * 256)
    page = allocator.give_to_cache("a", 1)
    assert allocator.counts()["pages"] == NOTHING | {"free": 5, "reserved": 2, "shared": 1}
    with pytest.raises(AllocatorError, match="is not a's own"):
        allocator.give_to_cache("a", 1)
    shared = allocator.reserve("b", 300, shared=[page])
    assert shared is not None
    assert (shared.pages[0], shared.read_only, len(shared.pages)) == (page, 1, 2)
    assert allocator.n_readers(page) == 2
    allocator.release("a")
    assert page not in told[-1].pages
    assert unread == []
    allocator.release("b")
    assert unread == [page]
    assert allocator.counts()["pages"] == NOTHING | {"free": 7, "cached": 1}
    assert allocator.n_available == 8
    allocator.discard(page)
    assert told[-1] == Placement(0, (page,))
    assert allocator.counts()["pages"] == NOTHING | {"free": 8}


def test_a_page_that_the_cache_gives_up_is_free_with_its_last_reader() -> None:
    allocator = Allocator(make_geometry(pages=9))
    allocator.reserve("a", 256)
    page = allocator.give_to_cache("a", 0)
    allocator.discard(page)
    with pytest.raises(AllocatorError, match="is not the cache's"):
        allocator.discard(page)
    with pytest.raises(AllocatorError, match="are not the cache's"):
        allocator.reserve("b", 256, shared=[page])
    assert allocator.counts()["pages"] == NOTHING | {"free": 7, "shared": 1}
    allocator.release("a")
    assert allocator.counts()["pages"] == NOTHING | {"free": 8}


def test_a_grant_that_is_refused_reads_nothing() -> None:
    allocator = Allocator(make_geometry(pages=9))
    allocator.reserve("a", 256)
    page = allocator.give_to_cache("a", 0)
    for wrong in ([page, 8], [8, page]):
        with pytest.raises(AllocatorError, match=r"pages \[8\] are not the cache's"):
            allocator.reserve("b", 700, shared=wrong)
    with pytest.raises(AllocatorError, match="2 pages are more than 256 tokens need"):
        allocator.reserve("b", 256, shared=[page, page])
    assert allocator.reserve("b", 9 * 256, shared=[page]) is None
    assert allocator.n_readers(page) == 1


def test_pages_that_a_grant_needs_itself_do_not_count_as_available() -> None:
    """Else there would be nothing left to evict."""
    allocator = Allocator(make_geometry(pages=5))
    allocator.reserve("a", 4 * 256)
    pages = [allocator.give_to_cache("a", index) for index in range(4)]
    allocator.release("a")
    assert allocator.n_available == 4
    assert allocator.reserve("b", 256, pinned=pages) is None

    def evict(n_pages: int) -> None:
        for page in pages[-n_pages:]:
            allocator.discard(page)

    allocator.evict = evict
    placement = allocator.reserve("b", 4 * 256, shared=pages[:3])
    assert placement is not None
    assert placement.pages == tuple(pages)


def test_offered_pages_are_settled_and_the_places_that_they_take_are_free() -> None:
    allocator = Allocator(make_geometry(pages=9))
    allocator.reserve("a", 3 * 256)
    cached = [allocator.give_to_cache("a", index) for index in range(3)]
    allocator.release("a")
    private = allocator.reserve("b", 4 * 256, pinned=cached)
    assert private is not None
    assert not set(private.pages) & set(cached)
    with pytest.raises(AllocatorError, match="does not hold the cached pages"):
        allocator.settle("b", {0: private.pages[1]})
    settled = allocator.settle("b", {0: cached[0], 2: cached[2]})
    assert settled.pages == (cached[0], private.pages[1], cached[2], private.pages[3])
    assert allocator.placement_of("b") == settled
    assert [allocator.n_readers(page) for page in cached] == [1, 0, 1]
    assert allocator.counts()["pages"] == NOTHING | {"free": 3, "reserved": 2, "shared": 2, "cached": 1}
    with pytest.raises(AllocatorError, match="are not b's own"):
        allocator.settle("b", {0: cached[2]})
    allocator.release("b")
    assert allocator.counts()["pages"] == NOTHING | {"free": 5, "cached": 3}
