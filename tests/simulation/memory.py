"""The decode node's memory as the transport sees it: who wrote what where, and whether that was allowed."""

from __future__ import annotations

from dataclasses import dataclass

from server.cache.allocator import Allocator, ItemState
from server.cache.layout import Placement
from server.cache.specs import CacheGeometry
from server.transfer.rooms import RoomKey

PAGE_TOKENS = 4
N_TOKENS = 6
"""Two pages a request."""


def allocator(n_slots: int, seed: int) -> Allocator:
    geometry = CacheGeometry(PAGE_TOKENS, 2 * n_slots + 1, n_slots + 1, 8, 0, ())
    return Allocator(geometry, permute_seed=seed)


@dataclass(frozen=True)
class Write:
    """One batch under way: of ``key``, from ``source`` on the prefill node into ``target`` of a transport session."""

    key: RoomKey
    session: int
    source: Placement
    target: Placement
    batch_id: int


class Memory:
    """``allocator`` says who owns an item; ``cells`` what lies in it: the batches of one room since its reservation."""

    def __init__(self, n_slots: int, seed: int) -> None:
        self.allocator = allocator(n_slots, seed)
        self.n_slots = n_slots
        self._holders: dict[tuple[str, int], RoomKey] = {}
        self._sessions: dict[RoomKey, int] = {}
        self._cells: dict[tuple[str, int], set[tuple[RoomKey, int]]] = {}

    def reserve(self, key: RoomKey, session: int) -> Placement | None:
        """For ``key``, in the registration with this transport ``session``."""
        placement = self.allocator.reserve(key, N_TOKENS)
        self._sessions[key] = session
        for item in _items(placement) if placement is not None else ():
            holder = self._holders.setdefault(item, key)
            assert holder is key, f"{item} belongs to {holder} and was given to {key} too"
        return placement

    def release(self, key: RoomKey) -> None:
        for item in _items(self.allocator.placement_of(key)):
            del self._holders[item]
            self._cells.pop(item, None)
        self.allocator.release(key)

    def land(self, write: Write) -> None:
        """Bytes of a write arrive: only in memory that its registration reserved for its room.

        That memory waits for the room, or is quarantined because of it.
        """
        for item in _items(write.target):
            holder = self._holders.get(item)
            assert holder == write.key, f"a write of {write.key} landed in {item}, which belongs to {holder}"
            reserved_in = self._sessions[holder]
            assert reserved_in == write.session, (
                f"{write.key} was reserved in {reserved_in}, written in {write.session}"
            )
            self._cells.setdefault(item, set()).add((write.key, write.batch_id))
        state = self.allocator.state_of(write.key)
        assert state in (ItemState.RESERVED, ItemState.QUARANTINED), f"a write landed in {state} memory of {write.key}"

    def check_committed(self, key: RoomKey, n_batches: int) -> None:
        """Everything that the prefill node pushed lies here, and nothing else."""
        wanted = {(key, batch_id) for batch_id in range(1, n_batches + 1)}
        for item in _items(self.allocator.placement_of(key)):
            assert self._cells.get(item, set()) == wanted, f"{key} was committed with {self._cells.get(item)} in {item}"

    @property
    def all_free(self) -> bool:
        return self.allocator.counts()["slots"]["free"] == self.n_slots and not self._holders


def _items(placement: Placement) -> list[tuple[str, int]]:
    return [("slot", placement.slot), *(("page", page) for page in placement.pages)]
