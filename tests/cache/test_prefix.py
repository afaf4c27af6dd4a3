"""Pages of requests that are over are found by their content, and go when somebody needs the room."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from server.cache.owners import Owner
from server.cache.prefix import PromptKeys, page_key, root_key
from server.cache.snapshots import Snapshot, SnapshotPoint
from server.cache.specs import Scope
from tests.cache.prefixes import PAGE, Node


def test_keys_are_of_complete_pages_and_of_all_before_them() -> None:
    ids = list(range(2 * PAGE + 255))
    keys, changed = PromptKeys(b"root", ids, PAGE), PromptKeys(b"root", [7, *ids[1:]], PAGE)
    assert (len(keys), keys.n) == (2, len(ids))
    assert keys.keys[0] == page_key(b"root", np.arange(PAGE, dtype="<i4").tobytes())
    assert keys.keys[1] == page_key(keys.keys[0], np.arange(PAGE, 2 * PAGE, dtype="<i4").tobytes())
    assert not set(keys.keys) & set(changed.keys)
    assert keys.common_pages(changed) == 0
    assert changed.common_pages(changed) == 2
    assert keys.common_pages(PromptKeys(b"root", ids[:300], PAGE)) == 1
    assert keys.common_pages(PromptKeys(b"salt", ids, PAGE)) == 0


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 700])
def test_keys_of_a_packed_prompt_are_those_of_its_ids(n: int) -> None:
    ids = [(i * 7919) % (2**31) for i in range(n)]
    packed = PromptKeys(b"root", np.asarray(ids, dtype="<i4").tobytes(), PAGE)
    plain = PromptKeys(b"root", ids, PAGE)
    assert (packed.keys, packed.ids, packed.n) == (plain.keys, plain.ids, plain.n)
    assert packed.n == n


def test_a_root_is_of_every_part_of_the_identity() -> None:
    roots = {root_key(parts, salt) for parts, salt in product((["ab"], ["a", "b"], ["", "ab"], []), ("", "a", "ab"))}
    assert len(roots) == 12


def test_what_begins_alike_is_found_up_to_where_it_parts() -> None:
    node = Node()
    node.run(1, "abc")
    node.run(2, "abd")
    assert set(node.cached()) == {"a", "ab", "abc", "abd"}
    assert [page.index for page in node.cache.match(node.keys("abx"))] == [0, 1]
    assert node.cache.match(node.keys("bc")) == ()
    assert node.cache.match(node.keys("abc", salt="another tenant")) == ()


def test_content_that_is_there_is_not_kept_twice() -> None:
    node = Node()
    first, second = node.keys("ab"), node.keys("ab")
    node.begin(1, first)
    node.begin(2, second)
    node.keep_all(1, first)
    assert not node.keep(2, second, 0)
    assert not node.keep(2, second, 1)
    node.end(1)
    node.end(2)
    assert node.allocator.counts()["pages"]["cached"] == 2


def test_a_hit_needs_a_snapshot_and_a_token_to_compute() -> None:
    node = Node(snapshot_nbytes=100)
    keys = node.run(1, "abc")
    assert node.cache.hit(keys) is None
    assert node.snapshot(keys, 1)
    assert node.snapshot(keys, 3)
    found = {more: node.cache.hit(node.keys("abc", more=more)) for more in (0, 1)}
    assert [hit.n if hit else 0 for hit in found.values()] == [PAGE, 3 * PAGE]
    hit = found[1]
    assert hit is not None
    assert (len(hit.pages), hit.point, hit.snapshot.n) == (3, SnapshotPoint(3 * PAGE, keys.keys[2]), 3 * PAGE)


def test_a_prompt_counts_once_however_often_it_is_looked_up() -> None:
    node = Node(snapshot_nbytes=100)
    early = node.keys("abc")
    assert node.cache.hit(early) is None
    keys = node.run(1, "ab")
    node.snapshot(keys, 2)
    for _ in range(3):
        assert node.cache.hit(early) is not None
    assert (node.cache.counts.looked_up, node.cache.counts.found) == (early.n, 2 * PAGE)


def test_pages_are_evicted_from_the_ends_and_by_use() -> None:
    node = Node(pages=6, slots=4)
    node.run(1, "ab")
    node.run(2, "cd")
    node.cache.match(node.keys("ab"))
    node.run(3, "xyz")
    assert set(node.cached()) == {"a", "ab", "x", "xy", "xyz"}
    assert node.cache.counts.evicted_pages == 2
    node.run(4, "pqr")
    assert set(node.cached()) == {"p", "pq", "pqr", "x", "xy"}, "and a page of what is computed"


def test_use_ends_with_the_last_reader() -> None:
    node = Node(pages=6)
    first = node.keys("ab")
    node.begin(1, first)
    node.keep_all(1, first)
    node.run(2, "cd")
    node.end(1)
    node.run(3, "xyz")
    assert "ab" in node.cached()
    assert "cd" not in node.cached()


def test_what_follows_a_page_that_nobody_reads_does_not_keep_it() -> None:
    """Room 2 has the page's content in memory of its own, and gave the cache what follows."""
    node = Node(pages=4, slots=3)
    node.begin(1, node.keys("a", more=0))
    second = node.keys("ab", more=0)
    node.begin(2, second)
    node.keep(1, node.keys("a", more=0), 0)
    assert not node.keep(2, second, 0)
    assert node.keep(2, second, 1)
    node.end(1)
    assert node.allocator.n_available == 2
    assert node.begin(3, node.keys("xy", more=0)) is not None
    assert node.cached() == {}
    assert node.allocator.counts()["pages"]["shared"] == 1
    node.end(2)
    assert node.allocator.counts()["pages"]["free"] == 2


def test_no_more_pages_than_allowed_are_kept_unread() -> None:
    node = Node(max_pages=2)
    node.run(1, "abcd")
    assert set(node.cached()) == {"a", "ab"}
    node.run(2, "xyz")
    assert set(node.cached()) == {"x", "xy"}
    Node(max_pages=0).run(1, "abcd")


def test_snapshots_go_by_their_own_use() -> None:
    node = Node(snapshot_nbytes=3)
    keys = node.run(1, "abcd")
    for n_pages in (1, 2, 3):
        assert node.snapshot(keys, n_pages)
    assert node.cache.hit(node.keys("a")) is not None
    assert node.snapshot(keys, 4, nbytes=2)
    assert sorted(s.n for s in node.cache.snapshots) == [PAGE, 4 * PAGE]
    assert (node.cache.held_nbytes, node.cache.n_snapshots, node.cache.counts.evicted_snapshots) == (3, 2, 2)
    assert not node.snapshot(keys, 2, nbytes=4)
    assert not node.snapshot(keys, 4), "there is one"
    assert not node.cache.keep_snapshot(Snapshot(5 * PAGE, keys.keys[3], b"", 0), keys)
    assert not node.cache.keep_snapshot(Snapshot(PAGE, node.keys("b").keys[0], b"", 0), node.keys("b"))


def test_snapshots_go_with_their_pages() -> None:
    node = Node(pages=4, snapshot_nbytes=10)
    node.snapshot(node.run(1, "ab"), 2, nbytes=7)
    node.run(2, "xyz")
    assert (node.cache.held_nbytes, node.cache.n_snapshots, node.cache.counts.evicted_snapshots) == (0, 0, 1)


def test_a_damaged_page_is_forgotten_with_what_follows_and_readers_go_on() -> None:
    node = Node()
    node.run(1, "abc")
    node.run(2, "ax")
    keys = node.keys("abc")
    placement = node.begin(3, keys, 3)
    assert placement is not None
    damaged = node.cached()["ab"]
    node.cache.drop(damaged)
    assert set(node.cached()) == {"a", "ax"}
    assert not set(node.freed) & set(placement.pages[:3])
    node.cache.drop(damaged)  # a second reader found it too
    assert set(node.cached()) == {"a", "ax"}
    assert node.cache.counts.damaged == 2
    assert not node.keep(3, keys, 1), "it is not that room's own"
    node.end(3)
    assert node.allocator.counts()["pages"]["cached"] == 2


def test_a_page_that_was_dropped_is_not_the_one_that_took_its_place() -> None:
    node = Node()
    node.run(1, "ab")
    old = node.cached()["ab"]
    keys = node.keys("ab")
    assert node.cache.match(keys)[-1] is old
    node.cache.drop(old)
    node.run(2, "ab")
    node.cache.drop(old)
    assert node.cached()["ab"] is not old
    assert node.cache.match(keys)[-1] is node.cached()["ab"], "keys remember what they found"


def test_nothing_is_left_of_a_cache_that_was_flushed() -> None:
    node = Node(snapshot_nbytes=10)
    keys = node.run(1, "abc")
    node.snapshot(keys, 2)
    running = node.keys("abcd")
    node.begin(2, running, 3)
    assert node.cache.flush() == 3
    assert (len(node.cache), node.cache.held_nbytes, node.cache.n_snapshots) == (0, 0, 0)
    assert not any(node.keep(2, running, index) for index in range(4)), "what follows has nothing before it"
    assert not node.snapshot(running, 4)
    node.end(2)
    assert node.allocator.counts()["pages"]["free"] == 8
    node.run(3, "abc")
    assert len(node.cache) == 3


def test_memory_that_is_stamped_as_anothers_is_not_shared() -> None:
    node = Node()
    keys = node.keys("a")
    placement = node.begin(1, keys)
    assert placement is not None
    assert not node.cache.keep_page(1, Owner(2, 1), keys, 0, b"")
    assert node.owners.owner_of(Scope.PAGE, placement.pages[0]) == Owner(1, 1)
    assert len(node.cache) == 0


def constant(_parent: bytes, _ids: bytes) -> bytes:
    return b"the same for all"


def last_page_only(_parent: bytes, ids: bytes) -> bytes:
    return page_key(b"", ids)


def test_one_key_for_all_pages_is_never_a_hit() -> None:
    node = Node(key_of=constant, snapshot_nbytes=10)
    keys = node.run(1, "ab")
    assert set(node.cached()) == {"a"}
    assert node.snapshot(keys, 1)
    assert node.cache.match(node.keys("aa")) == (node.cached()["a"],)
    for other in ("b", "ba"):
        assert node.cache.hit(node.keys(other)) is None
    assert node.cache.counts.collisions > 0


def test_a_page_is_not_anothers_whose_beginning_only_has_the_same_key() -> None:
    """After "c" there is a "b" with the key of the one after "a"."""
    node = Node(key_of=last_page_only, snapshot_nbytes=10)
    node.run(1, "abx")
    keys = node.run(2, "cby")
    assert set(node.cached()) == {"a", "ab", "abx", "c"}
    assert len(node.cache.match(node.keys("aby"))) == 2
    assert len(node.cache.match(keys)) == 1
    assert not node.snapshot(keys, 2), "it would be found for the other prompt"
    assert node.cache.hit(node.keys("abx")) is None


def test_an_admission_into_a_full_cache_looks_at_no_more_pages_than_it_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(pages=4000)
    keys = node.cache.keys_of(np.arange(4000 * PAGE, dtype="<i4").tobytes())
    node.begin(0, keys)
    node.keep_all(0, keys)
    node.end(0)
    assert node.allocator.n_available == node.allocator.n_cached == 4000
    looked_at: list[int] = []
    n_readers = node.allocator.n_readers

    def counted(page: int) -> int:
        looked_at.append(page)
        return n_readers(page)

    monkeypatch.setattr(node.allocator, "n_readers", counted)
    assert node.allocator.reserve(1, 10 * PAGE) is not None
    assert len(node.cache) == 3990
    assert len(looked_at) <= 30
