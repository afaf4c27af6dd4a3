"""One contiguous block of memory per process, registered once, and the tensor views that the model computes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from server.cache.device import Mark, to_host
from server.cache.layout import PROBE_NBYTES, ArenaLayout, Placement, Run
from server.cache.owners import OwnerStamps
from server.cache.row_formats import QUANTIZED_ROWS
from server.cache.specs import Scope

POISON_BYTE = 0xFF
"""Fills free memory in poison mode: NaN in float32, bfloat16 and every quantized row (by its scales), absurd in the
hand-off row.
"""

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    **dict.fromkeys(QUANTIZED_ROWS, torch.uint8),
}
"""Of the elements of each row format."""


class Arena:
    """The flat pools of one process.

    Item 0 of every component (slot 0, page 0) is zero and stays zero: padding reads it. With ``poison`` every other
    byte starts as, and is scrubbed back to, :data:`POISON_BYTE`, so that a read of anything unsent shows. ``owners``
    says which room every slot and page is used by.
    """

    def __init__(self, layout: ArenaLayout, device: torch.device | str = "cpu", *, poison: bool = False) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.poison = poison
        self.owners = OwnerStamps(layout)
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self.device)
        if poison:
            self.buffer[PROBE_NBYTES:].fill_(POISON_BYTE)
            self._fill(Placement(slot=0, pages=(0,)), 0)
        self._host: memoryview | None = self.buffer.numpy().data if self.device.type == "cpu" else None
        Mark(self.device).wait()  # peers may write from now on

    @property
    def ptr(self) -> int:
        """Address of byte 0, for the transport."""
        return self.buffer.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def view(self, name: str) -> torch.Tensor:
        """A component as a strided tensor ``[items, rows, layers, width]`` of its elements, sharing the arena's memory.
        Quantized rows are bytes.
        """
        c = self.layout.component(name)
        dtype = TORCH_DTYPES[c.dtype]
        size = dtype.itemsize
        n_layers = max(len(c.layer_ids), 1)
        return self.buffer[c.offset % size :][: (self.nbytes - c.offset % size) // size * size].view(dtype).as_strided(
            (c.items, c.rows, n_layers, c.width),
            (c.item_stride // size, c.row_nbytes // size, c.width, 1),
            c.offset // size,
        )  # fmt: skip

    def read(self, runs: Iterable[Run]) -> bytes:
        """The bytes of ``runs``, joined in their order (copied to the CPU)."""
        return b"".join(self.memory(run) for run in runs)

    def memory(self, run: Run) -> memoryview:
        """The bytes of one run; on a CPU arena without a copy. On a GPU it waits for what is queued there."""
        if self._host is not None:
            return self._host[run.offset : run.offset + run.nbytes]
        return to_host(self.buffer[run.offset : run.offset + run.nbytes]).numpy().data

    def write(self, run: Run, data: bytes) -> None:
        """Overwrites one run (the hand-off row, the probe region); it is done when this returns."""
        if len(data) != run.nbytes:
            raise ValueError(f"{len(data)} bytes do not fill a run of {run.nbytes}")
        if self._host is not None:
            self._host[run.offset : run.offset + run.nbytes] = data
            return
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.buffer[run.offset : run.offset + run.nbytes].copy_(source)

    def scrub(self, placement: Placement) -> None:
        """Makes memory fit to be free again: in poison mode it is filled with the pattern. Slot 0 is left alone."""
        if self.poison:
            self._fill(placement, POISON_BYTE)
            Mark(self.device).wait()

    def _fill(self, placement: Placement, value: int) -> None:
        for c in self.layout.components:
            slots = (placement.slot,) if placement.slot or not value else ()
            for item in slots if c.scope is Scope.SLOT else placement.pages:
                start = c.offset + item * c.item_stride
                self.buffer[start : start + c.rows * c.row_nbytes].fill_(value)
