"""The arena's components as the layers see them: ring rows flat over slots, page entries by (page, row)."""

from __future__ import annotations

import torch

from server.cache.arena import Arena
from server.cache.specs import Scope
from server.model.batch import RingGather, RingWrite


class RingPool:
    """One slot component, ``[slots * ring, layers, width]``."""

    def __init__(self, arena: Arena, name: str) -> None:
        view = arena.view(name)
        self._rows = view.view(-1, *view.shape[2:])
        self._layer = {layer: i for i, layer in enumerate(arena.layout.component(name).layer_ids)}

    def gather(self, layer_id: int, plan: RingGather, own: torch.Tensor) -> torch.Tensor:
        """Rows ``plan.index`` out of the ring (before this forward's writes) and ``own`` ``[rows, width]``."""
        ring = self._rows[:, self._layer[layer_id]].index_select(0, plan.hist)
        return torch.cat([ring, own.to(ring.dtype)])[plan.index]

    def write(self, layer_id: int, plan: RingWrite, own: torch.Tensor) -> None:
        rows = own[: len(plan.slot_rows)] if plan.own_rows is None else own.index_select(0, plan.own_rows)
        self._rows[:, self._layer[layer_id]].index_copy_(0, plan.slot_rows, rows.to(self._rows.dtype))


class PagePool:
    """One page component, ``[pages, rows, layers, width]``, strided inside the page blocks."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._view = arena.view(name)
        self._layer = {layer: i for i, layer in enumerate(arena.layout.component(name).layer_ids)}

    def gather(self, layer_id: int, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Entries at ``(pages, rows)`` (any equal shape) -> that shape + ``[width]``."""
        return self._view[:, :, self._layer[layer_id]][pages, rows]

    def write(self, layer_id: int, pages: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        self._view[:, :, self._layer[layer_id]][pages, rows] = values.to(self._view.dtype)


class Pools:
    """Every component of an arena by name (the model does not use the hand-off row)."""

    def __init__(self, arena: Arena) -> None:
        self.ring: dict[str, RingPool] = {}
        self.page: dict[str, PagePool] = {}
        for component in arena.layout.components:
            if not component.layer_ids:
                continue
            if component.scope is Scope.SLOT:
                self.ring[component.name] = RingPool(arena, component.name)
            else:
                self.page[component.name] = PagePool(arena, component.name)
