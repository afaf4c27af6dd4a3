"""A stamp says whose memory it is, whatever the allocator believes."""

from __future__ import annotations

import pytest

from server.cache.layout import ArenaLayout, Placement
from server.cache.owners import Owner, OwnerStamps, WrongOwner
from server.cache.specs import Scope
from tests.transfer.support import make_geometry

LAYOUT = ArenaLayout.from_geometry(make_geometry(slots=4, pages=8, draft=True))
OURS, THEIRS = Owner(1, 1), Owner(1, 2)
MEMORY = Placement(2, (5, 3, 6))


def stamped() -> OwnerStamps:
    stamps = OwnerStamps(LAYOUT)
    stamps.stamp(MEMORY, OURS)
    return stamps


@pytest.mark.parametrize("name", LAYOUT.names)
def test_every_component_in_foreign_memory_is_named_with_both_owners(name: str) -> None:
    stamps = stamped()
    stamps.check(303, MEMORY, [name], OURS)
    with pytest.raises(WrongOwner, match=f"{name}: .* belongs to room 1 epoch 1, expected room 1 epoch 2") as caught:
        stamps.check(303, MEMORY, [name], THEIRS)
    assert caught.value.component == name


def test_memory_of_nobody_is_refused() -> None:
    with pytest.raises(WrongOwner, match="swa: slot 3 belongs to nobody"):
        stamped().check(300, Placement(3, MEMORY.pages), ["swa"], OURS)
    with pytest.raises(WrongOwner, match="c4_kv: page 0 belongs to nobody"):
        stamped().check(300, Placement(2, (5, 0)), ["c4_kv"], OURS)


def test_only_items_that_hold_live_rows_are_looked_at() -> None:
    elsewhere = Placement(2, (5, 7))
    stamped().check(256, elsewhere, LAYOUT.names, OURS)
    with pytest.raises(WrongOwner, match="c4_kv: page 7"):
        stamped().check(260, elsewhere, LAYOUT.names, OURS)
    stamped().check(300, Placement(2, (1, 1)), ["c128_state"], OURS)


def test_memory_that_is_granted_twice_stays_its_first_owners() -> None:
    stamps = stamped()
    stamps.stamp(MEMORY, THEIRS)
    stamps.check(300, MEMORY, LAYOUT.names, OURS)
    stamps.clear(MEMORY, THEIRS)
    stamps.check(300, MEMORY, LAYOUT.names, OURS)
    stamps.clear(MEMORY, OURS)
    with pytest.raises(WrongOwner, match="nobody"):
        stamps.check(300, MEMORY, LAYOUT.names, OURS)


def test_what_holds_a_long_prompt_is_said_by_component_not_by_page() -> None:
    pages = tuple(range(1, 8))
    found = OwnerStamps(LAYOUT).items_of(7 * LAYOUT.page_size, Placement(2, pages), LAYOUT.names)
    assert len({item.component for item in found}) == len(found) <= len(LAYOUT.names)
    assert {item.items for item in found if item.scope is Scope.PAGE} == {pages}


def test_two_rooms_of_one_name_read_a_shared_page_each_for_itself() -> None:
    """Those of two decode nodes may have the same id and epoch."""
    stamps = stamped()
    stamps.share(5, OURS)
    second = Placement(3, (5,))
    stamps.stamp(second, OURS)
    stamps.clear(MEMORY, OURS)
    stamps.check(4, second, ["c4_kv"], OURS)
    stamps.clear(second, OURS)
    with pytest.raises(WrongOwner, match="c4_kv: page 5 belongs to nobody"):
        stamps.check(4, second, ["c4_kv"], OURS)
