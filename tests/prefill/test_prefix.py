"""Where snapshots are taken, and which room waits for which."""

from __future__ import annotations

from collections.abc import Sequence

from server.cache.prefix import CachedPage, PromptKeys
from server.cache.snapshots import Snapshot, SnapshotPoint
from server.prefill.prefix import Awaited, PromptPrefix, snapshot_points, to_wait_for

PAGE = 4


def prompt(text: str) -> PromptKeys:
    """A page for each letter, and ``.`` for one token more."""
    return PromptKeys(b"root", [ord(c) for c in text for _ in range(1 if c == "." else PAGE)], PAGE)


def chain(keys: PromptKeys, n_pages: int, *with_snapshot: int) -> tuple[CachedPage, ...]:
    """The first ``n_pages`` of a prompt as cached pages, with snapshots after these numbers of them."""
    found: list[CachedPage] = []
    for i in range(n_pages):
        parent = found[-1] if found else None
        found.append(CachedPage(i, keys.keys[i], keys.ids[i], parent, keys.root, i + 1, b"", 1))
        if i + 1 in with_snapshot:
            found[-1].snapshot = Snapshot((i + 1) * PAGE, keys.keys[i], b"", 0)
    return tuple(found)


def points(
    keys: PromptKeys,
    *,
    n_hit: int = 0,
    cached: tuple[CachedPage, ...] = (),
    others: Sequence[PromptKeys] = (),
    every: int = 0,
) -> list[int]:
    """After how many pages snapshots are taken."""
    found = snapshot_points(keys, PAGE, n_hit * PAGE, cached, others, every)
    assert all(point.key == keys.keys[point.n // PAGE - 1] for point in found)
    assert [point.n for point in found] == sorted({point.n for point in found})
    return [point.n // PAGE for point in found]


def computed(keys: PromptKeys, *pages: int) -> PromptPrefix:
    """A prompt that is being computed, with snapshots to come after so many pages."""
    prefix = PromptPrefix(keys, may_hit=True)
    prefix.begin(None, [SnapshotPoint(n * PAGE, keys.keys[n - 1]) for n in pages])
    return prefix


def test_a_prompt_has_a_snapshot_at_its_last_full_page_and_where_the_same_prompt_would_go_on() -> None:
    assert points(prompt("abc.")) == [3]
    assert points(prompt("abc")) == [2, 3]
    assert points(prompt("a")) == [1]
    assert points(prompt("...")) == []


def test_every_so_many_pages_there_is_one() -> None:
    assert points(prompt("abcdefg."), every=3) == [3, 6, 7]
    assert points(prompt("abcdef"), every=3) == [3, 5, 6]


def test_a_branch_seen_a_second_time_gets_one() -> None:
    keys = prompt("abcdef.")
    assert points(keys, cached=chain(keys, 2)) == [2, 6]
    assert points(keys, n_hit=1, cached=chain(keys, 4, 1)) == [4, 6]


def test_where_prompts_part_that_are_under_way_there_is_one() -> None:
    assert points(prompt("abcdef."), others=[prompt("abx."), prompt("abcdy."), prompt("z.")]) == [2, 4, 6]


def test_no_snapshot_is_taken_twice_nor_of_what_is_not_computed() -> None:
    keys = prompt("abcdefgh.")
    assert points(keys, n_hit=4, cached=chain(keys, 6, 4, 6), every=2) == [8]
    assert points(keys, n_hit=4, cached=chain(keys, 6, 4), others=[prompt("ab.")], every=2) == [6, 8]


def test_a_prompt_waits_for_the_first_snapshot_that_saves_it_something() -> None:
    first = computed(prompt("abcdef."), 2, 4, 6)
    found = to_wait_for(prompt("abcdx."), PAGE, 0, [first])
    assert found is not None
    assert (found.prefix, found.point.n) == (first, 2 * PAGE)
    found = to_wait_for(prompt("abcdx."), PAGE, 2 * PAGE, [first])
    assert found is not None
    assert found.point.n == 4 * PAGE
    assert to_wait_for(prompt("abcdx."), PAGE, 4 * PAGE, [first]) is None, "the rest is its own"


def test_nothing_is_waited_for_that_saves_nothing() -> None:
    assert to_wait_for(prompt("xy."), PAGE, 0, [computed(prompt("abc."), 3)]) is None
    assert to_wait_for(prompt("abx."), PAGE, 0, [computed(prompt("abc."), 3)]) is None, "there is none where they part"
    assert to_wait_for(prompt("abc"), PAGE, 0, [computed(prompt("abc"), 3)]) is None, "one token has to be computed"
    assert to_wait_for(prompt("abc"), PAGE, 0, [computed(prompt("abc"), 2, 3)]) is not None
    other_tenant = PromptKeys(b"other", [ord(c) for c in "abcd" for _ in range(PAGE)], PAGE)
    assert to_wait_for(other_tenant, PAGE, 0, [computed(prompt("abcd"), 1)]) is None


def test_the_soonest_of_several_is_waited_for() -> None:
    late, soon = computed(prompt("abcdef."), 5), computed(prompt("abcdef."), 3)
    found = to_wait_for(prompt("abcdef."), PAGE, 0, [late, soon])
    assert found is not None
    assert found.prefix is soon


def test_what_ended_is_not_awaited_any_more() -> None:
    first = computed(prompt("abc."), 3)
    awaited = Awaited(first, first.pending[0])
    assert awaited.is_coming
    first.ended()
    assert not awaited.is_coming
