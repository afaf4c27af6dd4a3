"""Attention: one shared K=V row per token, a sliding window plus compressed entries, sinks, grouped output."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from server.model.batch import ENTRY_BLOCK, Batch, CompressedView, EntryTable
from server.model.batch_invariant import bmm
from server.model.compressor import Compressor, Indexer
from server.model.config import CSA, HCA, SLIDING, ModelConfig
from server.model.layers import Linear, RMSNorm, grouped_matmul_rows, pad_rows
from server.model.numerics import NumericsLayer
from server.model.pools import Pools
from server.model.rope import Rotation

_QUERY_ROWS = 64
"""Query rows attended at a time, to bound the memory of their gathered keys."""

Candidates = tuple[torch.Tensor, torch.Tensor]
"""Rows ``[rows, k, head_dim]`` that queries may read, and which of them they do, ``[rows, k]``."""


class Attention(NumericsLayer):
    """One layer's attention, keys ``attn.*``. ``swa`` names the ring component that holds its window."""

    def __init__(
        self, config: ModelConfig, layer_id: int, ratio: int, row_tile: int, dtype: torch.dtype, swa: str = "swa"
    ) -> None:
        super().__init__()
        d, heads, groups = config.head_dim, config.num_attention_heads, config.o_groups
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, row_tile, dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Linear(config.q_lora_rank, heads * d, row_tile, dtype)
        self.wkv = Linear(config.hidden_size, d, row_tile, dtype)
        self.kv_norm = RMSNorm(d, config.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
        self.wo_a = Linear(heads * d // groups, groups * config.o_lora_rank, row_tile, dtype)
        self.wo_b = Linear(groups * config.o_lora_rank, config.hidden_size, row_tile, dtype)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if ratio == CSA:
            self.compressor = Compressor(config, layer_id, CSA, d, "c4_state", "c4_kv", row_tile)
            self.indexer = Indexer(config, layer_id, row_tile, dtype)
        elif ratio == HCA:
            self.compressor = Compressor(config, layer_id, HCA, d, "c128_state", "c128_kv", row_tile)
        self.layer_id, self.ratio, self.swa = layer_id, ratio, swa
        self.heads, self.head_dim, self.groups, self.eps = heads, d, groups, config.rms_norm_eps
        self.rope_dim = config.rope_dim
        self.row_tile = row_tile

    def forward(self, x: torch.Tensor, batch: Batch, pools: Pools, rope: RopeSet) -> torch.Tensor:
        """``x`` ``[rows, D]`` (normed) -> ``[rows, D]``; reads the pools' past and writes these rows' state.

        Only real rows attend: each has products of its own, so that padding is needed for the shared maps alone.
        """
        rotation = rope.main if self.ratio == SLIDING else rope.compress
        qr = self.q_norm(self.wq_a(x))
        q = rotation.apply_(self.numerics.unit_heads(self.wq_b(qr).view(-1, self.heads, self.head_dim), self.eps))
        kv = self._kv_rows(x, rotation)

        ring = pools.ring[self.swa]
        window = ring.gather(self.layer_id, batch.window, kv)
        ring.write(self.layer_id, batch.swa_write, kv)
        entries = self._compress(x, qr, batch, pools, rope)

        parts = []
        for start in range(0, batch.n_rows, _QUERY_ROWS):
            rows = slice(start, min(start + _QUERY_ROWS, batch.n_rows))
            parts.append(self._attend(q[rows], self._candidates(rows, window, batch.window_mask, entries, pools)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._project(rotation.apply_(pad_rows(out.to(x.dtype), self.row_tile), inverse=True))

    def write_window(self, x: torch.Tensor, batch: Batch, pools: Pools, rope: RopeSet) -> None:
        """Writes the window rows of ``x`` ``[rows, D]`` (normed) without attending: all that later queries need of
        them.
        """
        rotation = rope.main if self.ratio == SLIDING else rope.compress
        pools.ring[self.swa].write(self.layer_id, batch.swa_write, self._kv_rows(x, rotation))

    def _kv_rows(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return self.numerics.kv_rows(rotation.apply_(self.kv_norm(self.wkv(x))), self.rope_dim)

    def _compress(
        self, x: torch.Tensor, qr: torch.Tensor, batch: Batch, pools: Pools, rope: RopeSet
    ) -> EntryTable | None:
        """Stores what these rows close, then says which compressed entries each row reads."""
        view = self._view(batch)
        if view is None or self.compressor is None:
            return None
        closing = rope.closing(view)
        self.compressor(x, view, pools, closing)
        if self.indexer is None:
            return view.entries
        self.indexer.compressor(x, view, pools, closing)
        entries: EntryTable = self.indexer(x, qr, view, pools, rope.compress)
        return entries

    def _view(self, batch: Batch) -> CompressedView | None:
        return {SLIDING: None, CSA: batch.csa, HCA: batch.hca}[self.ratio]

    def _candidates(
        self, rows: slice, window: torch.Tensor, mask: torch.Tensor, entries: EntryTable | None, pools: Pools
    ) -> list[Candidates]:
        """What query rows ``rows`` read: window rows oldest first and the first block of entries, then more blocks.

        Shapes depend on the kind of layer alone, not on how many entries there are.
        """
        if entries is None or self.compressor is None:
            return [(window[rows], mask[rows])]
        pool = pools.page[self.compressor.entries]
        blocks: list[Candidates] = []
        for start in range(0, entries.mask.shape[1], ENTRY_BLOCK):
            block = entries.part(rows, slice(start, start + ENTRY_BLOCK))
            blocks.append((pool.gather(self.layer_id, block.pages, block.rows), block.mask))
        first, first_mask = blocks[0]
        blocks[0] = torch.cat([window[rows], first], dim=1), torch.cat([mask[rows], first_mask], dim=1)
        return blocks

    def _attend(self, q: torch.Tensor, candidates: list[Candidates]) -> torch.Tensor:
        """Softmax over all candidate blocks plus a sink logit without a value; ``[rows, heads, head_dim]`` in fp32.

        Blocks are summed one after the other: one that is masked throughout adds exact zeros, so padding changes no
        bit.
        """
        scale, dtype, factor = self.head_dim**-0.5, q.dtype, self.numerics.attention_factor
        q, candidates = factor(q), [(factor(rows), mask) for rows, mask in candidates]
        scores = [
            bmm(q, rows.transpose(1, 2), self.row_tile).float().mul_(scale).masked_fill_(~mask[:, None], float("-inf"))
            for rows, mask in candidates
        ]
        top = scores[0].amax(-1, keepdim=True)
        for block in scores[1:]:
            top = torch.maximum(top, block.amax(-1, keepdim=True))
        denominator = (self.attn_sink[None, :, None] - top).exp()
        out: torch.Tensor | None = None
        for block, (rows, _) in zip(scores, candidates, strict=True):
            weights = block.sub_(top).exp_()
            denominator += weights.sum(-1, keepdim=True)
            part = bmm(factor(weights.to(dtype)), rows, self.row_tile).float()
            out = part if out is None else out.add_(part)
        if out is None:
            raise ValueError("a query needs at least its window")
        return out.div_(denominator)

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Grouped low-rank output: each group of heads through its own part of ``wo_a``, then all through ``wo_b``."""
        weight = self.wo_a.matrix().unflatten(0, (self.groups, -1))
        low = grouped_matmul_rows(out.reshape(out.shape[0], self.groups, -1), weight, self.row_tile)
        projected: torch.Tensor = self.wo_b(low)
        return projected


class RopeSet:
    """The rotations of one forward, made when first asked for: of its rows, and of the entries that it closes."""

    def __init__(self, batch: Batch, main: torch.Tensor, compress: torch.Tensor) -> None:
        self._batch, self._main, self._compress = batch, main, compress
        self._closing: dict[int, Rotation] = {}

    @cached_property
    def main(self) -> Rotation:
        """Rows at the frequencies of window-only layers."""
        return Rotation(self._batch.positions, self._main)

    @cached_property
    def compress(self) -> Rotation:
        """Rows at the frequencies of CSA and HCA layers."""
        return Rotation(self._batch.positions, self._compress)

    def closing(self, view: CompressedView) -> Rotation | None:
        """Entries that ``view`` closes, at their windows' first positions; None if it closes none."""
        if view.close is None:
            return None
        if id(view) not in self._closing:
            self._closing[id(view)] = Rotation(view.close.positions, self._compress)
        return self._closing[id(view)]
