from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cache.allocator import Allocator, AllocatorError
from tests.transfer.support import make_geometry


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
    assert allocator.counts()["pages"] == {"free": 6, "reserved": 2, "committed": 0, "quarantined": 0}
    allocator.commit("a")
    assert allocator.counts()["slots"]["committed"] == 1
    allocator.release("a")
    allocator.reserve("b", 300)
    allocator.quarantine("b")
    assert allocator.counts()["slots"]["quarantined"] == 1
    allocator.release("b")
    assert allocator.counts()["pages"] == {"free": 8, "reserved": 0, "committed": 0, "quarantined": 0}


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
