"""The memory of simulated nodes: who owns every slot and page, what lies in it, and which writes may land there."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.cache.allocator import Allocator, ItemState
from server.cache.arena import Arena
from server.cache.layout import PROBE_NBYTES, ArenaLayout, Placement, Run
from server.cache.specs import CacheGeometry, ComponentSpec, Scope, handoff_spec
from server.transfer.engines.base import PieceStatus, SubmitFailed, Ticket
from server.transfer.rooms import RoomKey

if TYPE_CHECKING:
    from tests.simulation.world import World

PAGE_TOKENS = 4
WINDOW = 4
LONGEST_PROMPT = 9
MAX_TOKENS = 3
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
    """The real one; it is wrong if an item is granted twice."""

    def __init__(self, world: World, geometry: CacheGeometry, seed: int) -> None:
        super().__init__(geometry, permute_seed=seed)
        self._world = world
        self._holders: dict[Item, Hashable] = {}

    def reserve(self, owner: Hashable, n_tokens: int) -> Placement | None:
        placement = super().reserve(owner, n_tokens)
        for item in items_of(placement) if placement is not None else ():
            holder = self._holders.setdefault(item, owner)
            self._world.check(holder is owner, f"{item} belongs to {holder} and was given to {owner} too")
        return placement

    def release(self, owner: Hashable) -> None:
        for item in items_of(self.placement_of(owner)):
            del self._holders[item]
        super().release(owner)

    def holder_of(self, item: Item) -> Hashable | None:
        return self._holders.get(item)

    def holds(self, owner: Hashable, placement: Placement) -> bool:
        return all(self._holders.get(item) == owner for item in items_of(placement))

    @property
    def all_free(self) -> bool:
        return not self._holders


def items_of(placement: Placement) -> list[Item]:
    return [(Scope.SLOT, placement.slot), *((Scope.PAGE, page) for page in placement.pages)]


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


def make_memory(world: World, n_slots: int, n_pages: int, extra_rows: int, seed: int) -> Memory:
    geo = geometry(n_slots, n_pages, extra_rows)
    arena = Arena(_layout(geo), poison=True)
    return Memory(arena, WatchedAllocator(world, geo, seed), _item_map(arena.layout))


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
