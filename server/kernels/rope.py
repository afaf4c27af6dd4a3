"""The rotations of positions as the kernels read them: blocks of cos and sin, made when a step first reaches them."""

from __future__ import annotations

import ctypes

import torch

from server.kernels import abi

BLOCK = 1024
"""Positions of one block. With 64 rotated channels it has 256 KiB."""


class RopeBlocks:
    """cos and sin ``[positions, rope_dim / 2, 2]`` in fp32 at ``frequencies`` ``[rope_dim / 2]``, as
    :class:`server.model.rope.Rotation` computes them. A context costs nothing until a step is that far.
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        self._frequencies = frequencies
        self._blocks: dict[int, torch.Tensor] = {}
        self._pointers = (ctypes.c_void_p * 0)()

    def reach(self, table: abi.RopeTable, first: int, last: int) -> None:
        """Makes the blocks that hold positions ``first .. last``, and has ``table`` point to all that there are."""
        for i in range(first // BLOCK, last // BLOCK + 1):
            if i not in self._blocks:
                self._make(i)
                table.blocks = ctypes.cast(self._pointers, ctypes.POINTER(ctypes.c_void_p))
                table.n_blocks, table.block = len(self._pointers), BLOCK

    def _make(self, i: int) -> None:
        positions = torch.arange(i * BLOCK, (i + 1) * BLOCK)
        angles = positions.float()[:, None] * self._frequencies
        self._blocks[i] = torch.stack([angles.cos(), angles.sin()], dim=-1).contiguous()
        if i >= len(self._pointers):
            grown = (ctypes.c_void_p * max(i + 1, 2 * len(self._pointers)))()
            ctypes.memmove(grown, self._pointers, ctypes.sizeof(self._pointers))
            self._pointers = grown
        self._pointers[i] = self._blocks[i].data_ptr()
