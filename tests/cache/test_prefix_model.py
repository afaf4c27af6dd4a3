"""Whatever rooms and the cache do, in any order: it is what a naive model of it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.cache.owners import Owner
from server.cache.prefix import KeyOf, PromptKeys, page_key
from server.cache.specs import Scope
from tests.cache.prefixes import PAGE, Node

N_PAGES, N_SLOTS, SNAPSHOT_NBYTES = 8, 4, 4
PROMPTS = st.text("ab", min_size=1, max_size=4)


def colliding(parent: bytes, ids: bytes) -> bytes:
    """Four keys for all pages."""
    return bytes([page_key(parent, ids)[0] & 3])


@dataclass
class Room:
    prompt: str
    keys: PromptKeys
    read: set[int]
    """Pages of the cache, or that were the cache's."""
    own: list[int]
    pages: tuple[int, ...]
    pinned: tuple[int, ...] = ()
    n_kept: int = 0
    is_quarantined: bool = False


@dataclass
class Kept:
    """A page of the cache, in the model."""

    page: int
    key: bytes
    used: int
    snapshot: int = 0


@dataclass
class Model:
    kept: dict[str, Kept] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    """Of which prefixes, the last one used last."""
    clock: int = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def match(self, prompt: str) -> list[str]:
        found = []
        for n in range(1, len(prompt) + 1):
            if prompt[:n] not in self.kept:
                break
            found.append(prompt[:n])
        return found

    def forget(self, prefix: str) -> None:
        """With all that follow."""
        for path in [path for path in self.kept if path.startswith(prefix)]:
            del self.kept[path]
            if path in self.snapshots:
                self.snapshots.remove(path)


class CacheMachine(RuleBasedStateMachine):
    key_of: KeyOf = staticmethod(page_key)

    @initialize(max_pages=st.sampled_from([None, None, 0, 2, 5]))
    def start(self, max_pages: int | None) -> None:
        self.max_pages = max_pages
        self.node = Node(
            pages=N_PAGES,
            slots=N_SLOTS,
            snapshot_nbytes=SNAPSHOT_NBYTES,
            max_pages=max_pages,
            key_of=type(self).key_of,
        )
        self.model = Model()
        self.rooms: dict[int, Room] = {}
        self.next_room = 1

    # --- the model's arithmetic --------------------------------------------------------------------------------------

    def read_now(self) -> set[int]:
        return {page for room in self.rooms.values() for page in room.read}

    def idle(self) -> list[str]:
        read = self.read_now()
        return [path for path, kept in self.model.kept.items() if kept.page not in read]

    def n_free(self) -> int:
        used = self.read_now() | {page for room in self.rooms.values() for page in room.own}
        return N_PAGES - len(used | {kept.page for kept in self.model.kept.values()})

    def evict(self, n_pages: int) -> None:
        """The least recently used of the idle pages that nothing follows, one after the other."""
        target = len(self.idle()) - n_pages
        while len(idle := self.idle()) > target:
            leaves = [path for path in idle if not any(other[:-1] == path for other in self.model.kept)]
            self.model.forget(min(leaves or idle, key=lambda path: self.model.kept[path].used))

    def unread(self, before: set[int]) -> None:
        now, gone = self.model.tick(), before - self.read_now()
        for kept in self.model.kept.values():
            if kept.page in gone:
                kept.used = now
        if self.max_pages is not None and gone:
            self.evict(len(self.idle()) - self.max_pages)

    # --- what can happen ---------------------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, more=st.integers(0, 1), takes=st.sampled_from(["shared", "pinned"]), n=st.integers(0, 4))
    def begin(self, prompt: str, more: int, takes: str, n: int) -> None:
        keys = self.node.keys(prompt, more=more)
        chain = self.node.cache.match(keys)
        matched = self.model.match(prompt)
        now = self.model.tick()
        for path in matched:
            self.model.kept[path].used = now
        assert [page.page for page in chain] == [self.model.kept[path].page for path in matched]
        read = [page.page for page in chain[:n]]
        room, self.next_room = self.next_room, self.next_room + 1
        n_own = len(prompt) + more - (len(read) if takes == "shared" else 0)
        kept_idle = len(set(read) - self.read_now())
        fits = len(self.rooms) < N_SLOTS and n_own <= self.n_free() + len(self.idle()) - kept_idle
        assert self.node.allocator.n_available == self.n_free() + len(self.idle())
        arguments: dict[str, Any] = {takes: read}
        placement = self.node.allocator.reserve(room, keys.n, **arguments)
        assert (placement is not None) is fits
        if placement is None:
            return
        n_free = self.n_free()
        own = list(placement.pages[placement.read_only :])
        assert len(own) == n_own
        assert len(set(placement.pages)) == len(placement.pages)
        held = self.read_now() | {page for other in self.rooms.values() for page in other.own}
        self.rooms[room] = Room(prompt, keys, set(read), [], placement.pages, tuple(read) if takes == "pinned" else ())
        self.evict(max(0, n_own - n_free))
        self.rooms[room].own = own
        assert not set(own) & (held | set(read) | {kept.page for kept in self.model.kept.values()})
        self.node.owners.stamp(placement, Owner(room, 1))
        self.node.place(room, placement)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        number, room = self.pick(data)
        index = room.n_kept
        if index >= len(room.keys):
            return
        room.n_kept += 1
        path, key = room.prompt[: index + 1], room.keys.keys[index]
        page = room.pages[index]
        has_parent = not index or path[:-1] in self.model.kept
        is_new = path not in self.model.kept and all(kept.key != key for kept in self.model.kept.values())
        expected = has_parent and is_new and page in room.own
        assert self.node.keep(number, room.keys, index) is expected
        if expected:
            room.own.remove(page)
            room.read.add(page)
            self.model.kept[path] = Kept(page, key, self.model.tick())

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), nbytes=st.integers(1, SNAPSHOT_NBYTES + 1), n_pages=st.integers(1, 4))
    def snapshot(self, data: st.DataObject, nbytes: int, n_pages: int) -> None:
        _, room = self.pick(data)
        if n_pages > len(room.keys):
            return
        path = room.prompt[:n_pages]
        expected = path in self.model.kept and path not in self.model.snapshots and nbytes <= SNAPSHOT_NBYTES
        assert self.node.snapshot(room.keys, n_pages, nbytes) is expected
        if expected:
            while nbytes + sum(self.model.kept[p].snapshot for p in self.model.snapshots) > SNAPSHOT_NBYTES:
                self.model.snapshots.pop(0)
            self.model.kept[path].snapshot = nbytes
            self.model.snapshots.append(path)

    @rule(prompt=PROMPTS, more=st.integers(0, 1))
    def hit(self, prompt: str, more: int) -> None:
        found = self.node.cache.hit(self.node.keys(prompt, more=more))
        now = self.model.tick()
        for path in self.model.match(prompt):
            self.model.kept[path].used = now
        paths = [path for path in self.model.match(prompt) if path in self.model.snapshots]
        best = next((path for path in reversed(paths) if len(path) < len(prompt) + more), None)
        assert (found is None) is (best is None)
        if found is not None and best is not None:
            assert "".join(chr(page.ids[0]) for page in found.pages) == best
            assert found.snapshot is found.pages[-1].snapshot
            assert (found.n, found.snapshot.n) == (len(best) * PAGE, len(best) * PAGE)
            self.model.snapshots.remove(best)
            self.model.snapshots.append(best)

    @precondition(lambda self: any(room.pinned for room in self.rooms.values()))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Some of the offered pages are held, the others not; as a decode node does it when a room is committed."""
        number = data.draw(st.sampled_from([n for n, room in self.rooms.items() if room.pinned]))
        room, owner = self.rooms[number], Owner(number, 1)
        held = data.draw(st.sets(st.sampled_from(range(len(room.pinned)))))
        places = {index: room.pinned[index] for index in held if room.pages[index] in room.own}
        before = self.read_now()
        unused = set(room.pinned) - set(places.values())
        self.node.owners.clear(self.node.allocator.placement_of(number), owner)
        placement = self.node.allocator.settle(number, places)
        self.node.place(number, placement)
        for index in places:
            room.own.remove(room.pages[index])
        room.read -= unused
        room.pinned, room.pages = (), placement.pages
        self.node.owners.stamp(placement, owner)
        self.unread(before)
        assert [placement.pages[index] for index in places] == list(places.values())

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        number, room = self.pick(data)
        if not room.is_quarantined:
            self.node.allocator.quarantine(number)
            room.is_quarantined = True

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number, _ = self.pick(data)
        before = self.read_now()
        del self.rooms[number]
        self.node.end(number)
        self.unread(before)

    @precondition(lambda self: self.model.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.model.kept)))
        self.node.cache.drop(self.node.cached()[path])
        self.model.forget(path)

    @rule()
    def flush(self) -> None:
        assert self.node.cache.flush() == len(self.model.kept)
        self.model.forget("")

    def pick(self, data: st.DataObject) -> tuple[int, Room]:
        number = data.draw(st.sampled_from(sorted(self.rooms)))
        return number, self.rooms[number]

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def the_cache_is_the_models(self) -> None:
        cached, cache = self.node.cached(), self.node.cache
        assert {path: page.page for path, page in cached.items()} == {p: k.page for p, k in self.model.kept.items()}
        assert {path for path, page in cached.items() if page.snapshot} == set(self.model.snapshots)
        assert cache.n_snapshots == len(list(cache.snapshots)) == len(self.model.snapshots)
        assert cache.held_nbytes == sum(snapshot.nbytes for snapshot in cache.snapshots) <= SNAPSHOT_NBYTES
        assert len(cache) == len(cached)

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.node.allocator.counts()
        assert sum(counts["slots"].values()) == N_SLOTS
        assert sum(counts["pages"].values()) == N_PAGES
        assert counts["slots"]["free"] == N_SLOTS - len(self.rooms)
        assert counts["pages"]["free"] == self.n_free()
        assert counts["pages"]["shared"] == len(self.read_now())
        assert counts["pages"]["cached"] == len(self.idle()) == self.node.allocator.n_cached
        assert self.max_pages is None or len(self.idle()) <= self.max_pages

    @invariant()
    def a_page_has_one_owner_or_readers(self) -> None:
        own = [page for room in self.rooms.values() for page in room.own]
        assert len(set(own)) == len(own)
        assert not set(own) & self.read_now()
        for number, room in self.rooms.items():
            for page in room.own:
                assert self.node.owners.owner_of(Scope.PAGE, page) == Owner(number, 1)
                assert self.node.owners.readers_of(page) is None
            for page in room.read - set(room.pinned):
                assert Owner(number, 1) in (self.node.owners.readers_of(page) or ())
                assert self.node.allocator.n_readers(page) >= 1

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        for number in list(self.rooms):
            self.node.end(number)
        self.node.cache.flush()
        counts = self.node.allocator.counts()
        assert (counts["pages"]["free"], counts["slots"]["free"]) == (N_PAGES, N_SLOTS)
        assert all(self.node.owners.readers_of(page) is None for page in range(N_PAGES + 1))


class CollidingMachine(CacheMachine):
    key_of: KeyOf = staticmethod(colliding)


STEPS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefixCache = CacheMachine.TestCase
TestPrefixCache.settings = STEPS
TestCollidingKeys = CollidingMachine.TestCase
TestCollidingKeys.settings = STEPS
