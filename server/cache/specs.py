"""What a component is: one kind of per-request state, a flat array of rows that hold all of its layers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from server.cache.row_formats import ITEMSIZE

HANDOFF = "handoff"
STREAMS_OFFSET = 512
"""Bytes of a hand-off row before its hidden streams."""
SWA = "swa"
DRAFT = "draft_swa"


class LayoutError(ValueError):
    """A geometry, placement or position that cannot exist. ``component`` is the one at fault, or empty."""

    def __init__(self, message: str, component: str = "") -> None:
        super().__init__(message)
        self.component = component


class Scope(enum.StrEnum):
    """Where a component's rows live: in 256-position pages that grow with the request, or in the request's slot."""

    PAGE = "page"
    SLOT = "slot"


@dataclass(frozen=True)
class ComponentSpec:
    """One component of the per-request state.

    ``positions`` is the number of token positions one row stands for: 4 or 128 for compressed rows, 1 in a slot. A row
    holds ``len(layer_ids)`` layers of ``width`` elements, layers inside the row ("position-major"). ``dtype`` names how
    they are stored (:mod:`.row_formats`); elements of a quantized row are its bytes. ``ring`` is the number of rows per
    slot; 0 for page components.
    """

    name: str
    scope: Scope
    positions: int
    layer_ids: tuple[int, ...]
    width: int
    dtype: str
    ring: int = 0

    @property
    def n_layers(self) -> int:
        """Layers inside one row. The hand-off row belongs to no layer and counts as one."""
        return max(len(self.layer_ids), 1)

    @property
    def row_nbytes(self) -> int:
        return self.n_layers * self.width * ITEMSIZE[self.dtype]

    def rows_per_item(self, page_size: int) -> int:
        """Rows in one page or one slot."""
        return page_size // self.positions if self.scope is Scope.PAGE else self.ring


def handoff_spec(hc_mult: int, hidden: int, dtype: str) -> ComponentSpec:
    """The hand-off row as a component: one row per slot, as wide as its struct and the hidden streams need."""
    width = STREAMS_OFFSET + hc_mult * hidden * ITEMSIZE[dtype]
    return ComponentSpec(HANDOFF, Scope.SLOT, 1, (), width, "uint8", ring=1)


@dataclass(frozen=True)
class CacheGeometry:
    """All of one process's pools. ``window`` is the sliding window W; ``spec_tokens`` the draft tokens k a ring can
    undo.

    ``pages`` and ``slots`` count item 0 too, which is never handed out.
    """

    page_size: int
    pages: int
    slots: int
    window: int
    spec_tokens: int
    components: tuple[ComponentSpec, ...]

    def __post_init__(self) -> None:
        if self.pages < 2 or self.slots < 2:
            raise LayoutError(
                f"need at least 2 pages and 2 slots (item 0 is never used), got {self.pages} and {self.slots}"
            )
        for spec in self.components:
            if spec.scope is Scope.PAGE and self.page_size % spec.positions:
                raise LayoutError(
                    f"page size {self.page_size} is not a multiple of {spec.name}'s {spec.positions} positions a row"
                )
            block = spec.rows_per_item(self.page_size) * spec.row_nbytes
            if spec.scope is Scope.PAGE and block % max(ITEMSIZE.values()):
                raise LayoutError(
                    f"the {spec.name} rows of a page of {self.page_size} tokens take {block} bytes, behind which the "
                    "next rows would not be aligned: the page size must be larger"
                )
            if spec.scope is Scope.SLOT and spec.ring < 1:
                raise LayoutError(f"slot component {spec.name} needs a ring of at least one row, got {spec.ring}")
        rings = {spec.name: spec.ring for spec in self.components if spec.name in (SWA, DRAFT)}
        if len(set(rings.values())) > 1:
            raise LayoutError(f"the draft's window ring must be as long as the target's, got {rings}")
