"""Faults of what is cached: each makes of it what its name says, and only for a room for which there is something."""

from __future__ import annotations

import pytest
import torch

from server.cache.allocator import Allocator
from server.cache.arena import POISON_BYTE
from server.cache.layout import ArenaLayout, Placement, Run
from server.cache.owners import Owner
from server.cache.prefix import CachedPage, PrefixCache, PrefixHit, PromptKeys, page_key
from server.cache.snapshots import SnapshotPoint, take_snapshot
from server.cache.specs import Scope
from server.faults.injection import Faults, hooks_of
from server.faults.spec import PAGED_NAMES, FaultSet
from tests.transfer.support import PAGE_SIZE, make_geometry, random_arena

STREAMS = torch.ones(2, 8)


class Node:
    """A cache with the first two pages of ``ids``, a snapshot behind each, and faults."""

    def __init__(self, *specs: str) -> None:
        geometry = make_geometry()
        self.arena = random_arena(ArenaLayout.from_geometry(geometry), 1)
        self.allocator = Allocator(geometry)
        hooks = hooks_of(FaultSet.parse(specs), self.arena)
        assert isinstance(hooks, Faults)
        self.hooks = hooks
        self.cache = PrefixCache(
            self.allocator, self.arena.owners, ["model"], PAGE_SIZE, snapshot_nbytes=1 << 20, key_of=hooks.page_key
        )

    def keep(self, ids: list[int]) -> PromptKeys:
        """A request of ``ids`` ends, and both of its pages are kept."""
        keys, owner = self.cache.keys_of(ids), Owner(1, 1)
        placement = self.allocator.reserve("before", len(ids))
        assert placement is not None
        self.arena.owners.stamp(placement, owner)
        for index in range(2):
            assert self.cache.keep_page("before", owner, keys, index, b"%08d" % index)
            point = SnapshotPoint((index + 1) * PAGE_SIZE, keys.keys[index])
            assert self.cache.keep_snapshot(take_snapshot(self.arena, placement, point, STREAMS), keys)
        self.arena.owners.clear(placement, owner)
        self.allocator.release("before")
        return keys

    def hit(self, keys: PromptKeys) -> PrefixHit:
        hit = self.cache.hit(keys)
        assert hit is not None
        return hit

    def take(self, room: str, hit: PrefixHit) -> PrefixHit:
        """What a room takes over of ``hit``."""
        taken = self.hooks.cache_hit(room, hit)
        assert taken is not None
        return taken

    def bytes_of(self, page: CachedPage) -> bytes:
        first = self.arena.layout.page_components[0]
        start = first.offset + page.page * first.item_stride
        return self.arena.read([Run(start, self.arena.layout.page_nbytes)])


def prompt(which: int) -> list[int]:
    return [which] * (2 * PAGE_SIZE + 1)


def n_flipped(before: bytes, after: bytes) -> int:
    return sum((one ^ other).bit_count() for one, other in zip(before, after, strict=True))


def test_page_components_are_those_of_the_model() -> None:
    assert {spec.name for spec in make_geometry().components if spec.scope is Scope.PAGE} == set(PAGED_NAMES)


@pytest.mark.parametrize("name", PAGED_NAMES)
def test_one_bit_of_the_first_page_that_is_taken_over_is_inverted_once(name: str) -> None:
    node = Node(f"flip-page:{name}:1")
    hit = node.hit(node.keep(prompt(1)))
    before = [node.bytes_of(page) for page in hit.pages]
    for _ in range(2):  # it waits for memory
        taken = node.take("room", hit)
    assert [n_flipped(a, node.bytes_of(page)) for a, page in zip(before, hit.pages, strict=True)] == [1, 0]
    assert taken.snapshot.damage(taken.point) is None
    node.hooks.cache_hit("the next room", hit)
    assert n_flipped(before[0], node.bytes_of(hit.pages[0])) == 1


def test_a_flipped_snapshot_is_not_what_was_taken_also_for_later_rooms() -> None:
    node = Node("flip-snapshot:1")
    keys = node.keep(prompt(1))
    taken = node.take("room", node.hit(keys))
    assert "are not those that were taken" in str(taken.snapshot.damage(taken.point))
    assert node.hit(keys).snapshot is taken.snapshot


def test_a_snapshot_of_an_earlier_boundary_is_one_of_the_same_prefix() -> None:
    node = Node("shift-snapshot")
    taken = node.take("room", node.hit(node.keep(prompt(1))))
    assert (taken.n, taken.snapshot.n) == (2 * PAGE_SIZE, PAGE_SIZE)
    assert "is of 256 tokens" in str(taken.snapshot.damage(taken.point))


def test_a_stale_snapshot_is_that_of_the_hit_before() -> None:
    node = Node("stale-snapshot")
    first, second = node.keep(prompt(1)), node.keep(prompt(2))
    assert node.hooks.cache_hit("room", node.hit(first)) == node.hit(first)  # there is none before
    taken = node.take("another room", node.hit(second))
    assert taken.snapshot is node.hit(first).snapshot
    assert "is of the prefix" in str(taken.snapshot.damage(taken.point))


def test_a_page_that_varies_is_offered_with_the_digest_of_its_bytes() -> None:
    node = Node("vary-page:c4_index:1")
    pages = node.cache.match(node.keep(prompt(1)))
    before = node.bytes_of(pages[0])
    node.hooks.offering("room", pages, node.cache)
    assert n_flipped(before, node.bytes_of(pages[0])) == 1
    first = pages[0].digest
    node.hooks.offering("the next room", pages, node.cache)
    assert pages[0].digest == first != b"%08d" % 0


def test_an_overwritten_offer_is_forgotten_and_its_last_page_is_not_what_it_was() -> None:
    node = Node("overwrite-offer")
    keys = node.keep(prompt(1))
    pages = node.cache.match(keys)
    before = node.bytes_of(pages[0])
    node.hooks.offering("room", pages, node.cache)
    assert not node.cache.match(keys)
    assert node.bytes_of(pages[1]) == bytes((POISON_BYTE,)) * node.arena.layout.page_nbytes
    assert node.bytes_of(pages[0]) == before


def test_an_evicted_offer_is_forgotten_when_its_room_is_reserved_and_stays_until_it_was_read() -> None:
    node = Node("evict-offer")
    keys = node.keep(prompt(1))
    pages = node.cache.match(keys)
    assert node.allocator.reserve("room", 1, pinned=[page.page for page in pages]) is not None
    before = node.bytes_of(pages[0])
    node.hooks.offering("room", pages, node.cache)
    assert node.cache.match(keys) == pages
    node.hooks.entered("queued")
    assert not node.cache.match(keys)
    assert node.bytes_of(pages[0]) == before
    assert node.allocator.counts()["pages"]["shared"] == 2


def test_keys_collide_for_all_prompts_and_nothing_is_found_under_another_ones_key() -> None:
    node = Node("collide-keys")
    assert node.hooks.page_key(b"parent", b"one") == node.hooks.page_key(b"parent", b"two") != page_key(b"x", b"one")
    node.keep(prompt(1))
    others = node.cache.keys_of(prompt(2))
    assert others.keys == node.cache.keys_of(prompt(1)).keys
    assert node.cache.hit(others) is None
    assert node.cache.counts.collisions


def test_faults_of_what_is_cached_are_not_used_up_by_rooms_without() -> None:
    node = Node("flip-page:c4_kv:1")
    hit = node.hit(node.keep(prompt(1)))
    before = node.bytes_of(hit.pages[0])
    node.hooks.sending("a room without", 10, Placement(1, (1,)))
    node.hooks.cache_hit("room", hit)
    assert n_flipped(before, node.bytes_of(hit.pages[0])) == 1
