"""The memory of simulated nodes: who owns every slot and page, what lies in it, and which writes may land there."""

from __future__ import annotations

import bisect
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from server.cache.allocator import Allocator, ItemState
from server.cache.arena import Arena
from server.cache.capacity import snapshot_nbytes
from server.cache.layout import PROBE_NBYTES, ArenaLayout, Placement, Run
from server.cache.prefix import PrefixCache, page_key
from server.cache.specs import CacheGeometry, ComponentSpec, Scope, handoff_spec
from server.transfer.engines.base import PieceStatus, SubmitFailed, Ticket
from server.transfer.rooms import RoomKey

if TYPE_CHECKING:
    from tests.simulation.world import World

PAGE_TOKENS = 4
WINDOW = 4
LONGEST_PROMPT = 13
MAX_TOKENS = 3
STREAMS_NBYTES = 8
"""What a snapshot has beside the slot's rows."""
MAX_SNAPSHOTS, MAX_UNREAD_PAGES = 4, 5
Item = tuple[Scope, int]


def geometry(n_slots: int, n_pages: int, extra_rows: int) -> CacheGeometry:
    """One component of each kind, and the hand-off row. ``extra_rows`` lengthens the ring."""
    specs = (
        ComponentSpec("c4_kv", Scope.PAGE, 4, (1,), 2, "float32"),
        ComponentSpec("swa", Scope.SLOT, 1, (0, 1), 2, "float32", ring=WINDOW + extra_rows),
        handoff_spec(1, 2, "float32"),
    )
    return CacheGeometry(PAGE_TOKENS, n_pages + 1, n_slots + 1, WINDOW, extra_rows, specs)


class WatchedAllocator(Allocator):
    """The real one, with a second book of who holds and who reads what. It is wrong if an item is granted while
    somebody has it, or becomes free while somebody reads it. What becomes free is scrubbed in ``arena``.
    """

    def __init__(self, world: World, geometry: CacheGeometry, arena: Arena, seed: int) -> None:
        super().__init__(geometry, permute_seed=seed, on_free=self._on_freed)
        self._world, self._arena = world, arena
        self._may_write: dict[Item, Hashable] = {}
        self._may_read: defaultdict[Item, set[Hashable]] = defaultdict(set)
        """Of the cache's pages."""

    def reserve(
        self, owner: Hashable, n_tokens: int, *, shared: Sequence[int] = (), pinned: Sequence[int] = ()
    ) -> Placement | None:
        read = [(Scope.PAGE, page) for page in (*shared, *pinned)]
        for item in read:
            self._may_read[item].add(owner)  # what is evicted for this grant must not be among it
        placement = super().reserve(owner, n_tokens, shared=shared, pinned=pinned)
        if placement is None:
            self._read_no_more(owner, read)
            return None
        for item in items_of(placement):
            if item not in read:
                holder = self._may_write.setdefault(item, owner)
                self._world.check(holder is owner, f"{item} belongs to {holder} and was given to {owner} too")
                readers = self._may_read[item]
                self._world.check(not readers, f"{item} is read by {readers} and was given to {owner}")
        return placement

    def give_to_cache(self, owner: Hashable, index: int) -> int:
        page = super().give_to_cache(owner, index)
        del self._may_write[Scope.PAGE, page]
        self._may_read[Scope.PAGE, page].add(owner)
        return page

    def settle(self, owner: Hashable, places: Mapping[int, int]) -> Placement:
        before = self.placement_of(owner)
        for place in places:
            del self._may_write[Scope.PAGE, before.pages[place]]
        put = {(Scope.PAGE, page) for page in places.values()}
        self._read_no_more(owner, [item for item in self._read_by(owner) if item not in put])
        self._world.seen["held"] += bool(places)
        return super().settle(owner, places)

    def release(self, owner: Hashable) -> None:
        self._may_write = {item: holder for item, holder in self._may_write.items() if holder != owner}
        self._read_no_more(owner, self._read_by(owner))
        super().release(owner)

    def _read_by(self, owner: Hashable) -> list[Item]:
        return [item for item, readers in self._may_read.items() if owner in readers]

    def _read_no_more(self, owner: Hashable, items: Iterable[Item]) -> None:
        for item in items:
            self._may_read[item].discard(owner)

    def _on_freed(self, freed: Placement) -> None:
        for item in items_of(freed):
            holder, readers = self._may_write.get(item), self._may_read[item]
            self._world.check(holder is None and not readers, f"{item} of {holder} is free, and {readers} read it")
        self._arena.scrub(freed)

    def holder_of(self, item: Item) -> Hashable | None:
        """The only one who may write there; None for pages of the cache, too."""
        return self._may_write.get(item)

    def reads(self, owner: Hashable, placement: Placement) -> bool:
        """Whether everything is ``owner``'s, or the cache's and read by ``owner``."""
        return all(self.is_read_by(owner, item) for item in items_of(placement))

    def is_read_by(self, owner: Hashable, item: Item) -> bool:
        return self._may_write.get(item) == owner or owner in self._may_read[item]

    @property
    def all_free(self) -> bool:
        """Whether nobody holds or reads anything."""
        return not self._may_write and not any(self._may_read.values())


def items_of(placement: Placement) -> list[Item]:
    slot = [(Scope.SLOT, placement.slot)] if placement.slot else []
    return [*slot, *((Scope.PAGE, page) for page in placement.pages)]


class ItemMap:
    """Which slot or page a byte of an arena belongs to."""

    def __init__(self, layout: ArenaLayout) -> None:
        spans = sorted(
            (c.offset + item * c.item_stride, c.offset + item * c.item_stride + c.rows * c.row_nbytes, (c.scope, item))
            for c in layout.components
            for item in range(c.items)
        )
        self._starts = [start for start, _, _ in spans]
        self._spans = spans

    def items(self, offset: int, nbytes: int) -> set[Item | None]:
        """Those that lie in a range; None for what is no item's."""
        found: set[Item | None] = set()
        while nbytes > 0:
            start, stop, item = self._spans[bisect.bisect_right(self._starts, offset) - 1]
            if not start <= offset < stop:
                return found | {None}
            found.add(item)
            nbytes -= stop - offset
            offset = stop
        return found


@dataclass(frozen=True)
class Memory:
    """One node's."""

    arena: Arena
    allocator: WatchedAllocator
    items: ItemMap
    cache: PrefixCache | None

    def rot(self, rng: random.Random) -> str:
        """One bit of something that is cached and that nobody reads is inverted; what it was, or nothing."""
        if self.cache is None:
            return ""
        states = self.allocator.cached_pages()
        pages = [page for page, state in states.items() if state is ItemState.CACHED and self.cache.page_of(page)]
        if not pages:
            return ""
        cached = self.cache.page_of(rng.choice(sorted(pages)))
        if cached is None:
            return ""
        if cached.snapshot is not None and rng.random() < 0.5:
            data = cached.snapshot.data
            cached.snapshot = replace(cached.snapshot, data=bytes((data[0] ^ 0x10,)) + data[1:])
            return "snapshot"
        first = self.arena.layout.page_components[0]
        run = Run(first.offset + cached.page * first.item_stride, 1)
        self.arena.write(run, bytes((self.arena.read([run])[0] ^ 0x10,)))
        return "page"


def one_key_for_all(parent: bytes, ids: bytes) -> bytes:
    """Of all pages behind one another: prompts of which the first tokens differ collide."""
    return page_key(parent, b"")


def make_memory(
    world: World, n_slots: int, n_pages: int, extra_rows: int, seed: int, *, is_cached: bool, keys_collide: bool
) -> Memory:
    geo = geometry(n_slots, n_pages, extra_rows)
    arena = Arena(_layout(geo), poison=True)
    allocator = WatchedAllocator(world, geo, arena, seed)
    cache = None
    if is_cached:
        cache = PrefixCache(
            allocator,
            arena.owners,
            ["simulated"],
            PAGE_TOKENS,
            snapshot_nbytes=MAX_SNAPSHOTS * snapshot_nbytes(arena.layout, STREAMS_NBYTES),
            max_pages=None if seed % 2 else MAX_UNREAD_PAGES,
            key_of=one_key_for_all if keys_collide else page_key,
        )
    return Memory(arena, allocator, _item_map(arena.layout), cache)


_layouts: dict[CacheGeometry, ArenaLayout] = {}
_item_maps: dict[ArenaLayout, ItemMap] = {}


def _layout(geo: CacheGeometry) -> ArenaLayout:
    return _layouts.setdefault(geo, ArenaLayout.from_geometry(geo))


def _item_map(layout: ArenaLayout) -> ItemMap:
    if layout not in _item_maps:
        _item_maps[layout] = ItemMap(layout)
    return _item_maps[layout]


# --- transport sessions -----------------------------------------------------------------------------------------------


@dataclass
class Session:
    """A transport endpoint of a decode process. Writes land in its ``memory`` while it ``is_open``."""

    name: str
    memory: Memory
    is_open: bool = False


@dataclass(frozen=True)
class Write:
    """Bytes under way to the absolute address ``dst`` in a transport session, for the room or probe ``key``."""

    key: Hashable
    session: str
    dst: int
    data: bytes


class Sessions:
    """All transport endpoints of all decode processes that ever were."""

    def __init__(self, check: Callable[[bool, str], None]) -> None:
        self._check = check
        self._numbers = itertools.count(1)
        self._all: dict[str, Session] = {}
        self.reserved_in: dict[RoomKey, str] = {}
        """The session of the registration in which a room was reserved."""

    def make(self, memory: Memory) -> Session:
        session = Session(str(next(self._numbers)), memory)
        self._all[session.name] = session
        return session

    def is_open(self, name: str) -> bool:
        return self._all[name].is_open

    def close_all_of(self, memory: Memory) -> None:
        for session in self._all.values():
            if session.memory is memory:
                session.is_open = False

    def land(self, write: Write) -> bool:
        """Bytes of a write arrive, unless the session is closed.

        They may only arrive in memory that the registration with this session reserved for this room, and that still
        waits for the room or is quarantined because of it.
        """
        session = self._all[write.session]
        if not session.is_open:
            return False
        memory = session.memory
        offset = write.dst - memory.arena.ptr
        if isinstance(write.key, RoomKey):
            self._check_room(write, write.key, memory, memory.items.items(offset, len(write.data)))
        else:
            self._check(0 <= offset <= PROBE_NBYTES - len(write.data), f"{write.key} landed outside the probe region")
        memory.arena.write(Run(offset, len(write.data)), write.data)
        return True

    def _check_room(self, write: Write, key: RoomKey, memory: Memory, items: set[Item | None]) -> None:
        for item in items:
            holder = memory.allocator.holder_of(item) if item is not None else None
            self._check(holder == key, f"a write of {key} landed in {item}, which belongs to {holder}")
        state = memory.allocator.state_of(key)
        may_land = state in (ItemState.RESERVED, ItemState.QUARANTINED)
        self._check(may_land, f"a write landed in {state} memory of {key}")
        reserved_in = self.reserved_in.get(key)
        self._check(
            reserved_in == write.session, f"{key} was reserved in session {reserved_in}, written in {write.session}"
        )


class SimulatedTransport:
    """A decode node's :class:`~server.transfer.engines.base.TransferEngine`: only its session matters."""

    kind = "loopback"
    version = "1"
    transport = "memory"

    def __init__(self, sessions: Sessions, memory: Memory) -> None:
        self._session = sessions.make(memory)

    @property
    def session(self) -> str:
        return self._session.name

    def register(self, ptr: int, nbytes: int) -> None:
        self._session.is_open = True

    def unregister(self, ptr: int) -> None:
        """Closing is the fence: until then writes may land."""

    def submit(self, session: str, src: int, dst: int, nbytes: int) -> Ticket:
        raise SubmitFailed("a decode node writes to nobody")

    def poll(self, ticket: Ticket) -> PieceStatus:
        raise SubmitFailed("a decode node writes to nobody")

    def close(self) -> None:
        self._session.is_open = False
