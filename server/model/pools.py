"""The arena's components as the layers see them: ring rows flat over slots, page entries by (page, row).

Rows are encoded when they are written and decoded when they are read (:mod:`.row_codecs`). What a forward reads of its
own rows went through both, like what it reads of earlier ones: how a prompt is cut into chunks changes no bit.
"""

from __future__ import annotations

import torch

from server.cache.arena import Arena
from server.cache.specs import Scope
from server.model.batch import RingGather, RingWrite
from server.model.config import ModelConfig
from server.model.row_codecs import RowCodec, row_codec


class RingPool:
    """One slot component, ``[slots * ring, layers, width]``."""

    def __init__(self, arena: Arena, name: str, codec: RowCodec) -> None:
        view = arena.view(name)
        self._rows, self._codec = view.view(-1, *view.shape[2:]), codec
        self._layer = {layer: i for i, layer in enumerate(arena.layout.component(name).layer_ids)}

    def gather(self, layer_id: int, plan: RingGather, own: torch.Tensor) -> torch.Tensor:
        """Rows ``plan.index`` out of the ring (before this forward's writes) and ``own`` ``[rows, channels]``."""
        ring = self._rows[:, self._layer[layer_id]].index_select(0, plan.hist)
        return self._codec.decode(torch.cat([ring, self._codec.encode(own)]))[plan.index]

    def write(self, layer_id: int, plan: RingWrite, own: torch.Tensor) -> None:
        rows = own[: len(plan.slot_rows)] if plan.own_rows is None else own.index_select(0, plan.own_rows)
        self._rows[:, self._layer[layer_id]].index_copy_(0, plan.slot_rows, self._codec.encode(rows))


class PagePool:
    """One page component, ``[pages, rows, layers, width]``, strided inside the page blocks."""

    def __init__(self, arena: Arena, name: str, codec: RowCodec) -> None:
        self._view, self._codec = arena.view(name), codec
        self._layer = {layer: i for i, layer in enumerate(arena.layout.component(name).layer_ids)}

    def gather(self, layer_id: int, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Entries at ``(pages, rows)`` (any equal shape) -> that shape + ``[channels]``."""
        return self._codec.decode(self._view[:, :, self._layer[layer_id]][pages, rows])

    def write(self, layer_id: int, pages: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        self._view[:, :, self._layer[layer_id]][pages, rows] = self._codec.encode(values)


class Pools:
    """Every component of an arena by name (the model does not use the hand-off row), for a model with ``config`` that
    computes in ``dtype``.

    Raises :class:`.LayoutError` for rows that are not the model's.
    """

    def __init__(self, arena: Arena, config: ModelConfig, dtype: torch.dtype) -> None:
        self.ring: dict[str, RingPool] = {}
        self.page: dict[str, PagePool] = {}
        for component in arena.layout.components:
            if not component.layer_ids:
                continue
            codec = row_codec(component, config, dtype)
            if component.scope is Scope.SLOT:
                self.ring[component.name] = RingPool(arena, component.name, codec)
            else:
                self.page[component.name] = PagePool(arena, component.name, codec)
