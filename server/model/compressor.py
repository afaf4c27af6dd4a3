"""Compressors pool the tokens of a window into one entry; the indexer picks which entries a query reads."""

from __future__ import annotations

import torch
from torch import nn

from server.model.batch import ENTRY_BLOCK, CompressedView, EntryPlan, EntryTable
from server.model.batch_invariant import bmm, softmax_pool
from server.model.config import CSA, ModelConfig
from server.model.layers import Linear, RMSNorm
from server.model.numerics import NumericsLayer
from server.model.pools import Pools
from server.model.rope import Rotation

_SCORE_ROWS = 16
"""Rows whose index scores are computed at a time, to bound memory."""

_END = 1 << 40
"""Sorts behind every entry."""


class Compressor(NumericsLayer):
    """One compressor of a CSA or HCA layer: attention's.

    Keys ``wkv.weight``, ``wgate.weight`` ``[coff d, D]``, ``ape`` ``[ratio, coff d]``, ``norm.weight`` ``[d]``;
    ``coff`` is 2 for CSA (halves A and B), else 1. Projections, state and pooling are fp32.
    """

    def __init__(
        self, config: ModelConfig, layer_id: int, ratio: int, width: int, state: str, entries: str, row_tile: int
    ) -> None:
        super().__init__()
        coff = 2 if ratio == CSA else 1
        self.wkv = Linear(config.hidden_size, coff * width, row_tile, torch.float32)
        self.wgate = Linear(config.hidden_size, coff * width, row_tile, torch.float32)
        self.ape = nn.Parameter(torch.empty(ratio, coff * width, dtype=torch.float32), requires_grad=False)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.layer_id, self.ratio, self.width, self.rope_dim = layer_id, ratio, width, config.rope_dim
        self.state, self.entries = state, entries

    def forward(self, x: torch.Tensor, view: CompressedView, pools: Pools, rotation: Rotation | None) -> None:
        """Adds rows ``x`` ``[rows, D]`` to the state and stores the entries they close.

        ``rotation`` is at the entries' positions, None if nothing closes.
        """
        wide = x.float()
        kv, score = self.wkv(wide), self.wgate(wide) + self.ape[view.phase]
        if self.ratio == CSA:
            halves = torch.stack([kv, score], dim=1).unflatten(2, (2, -1))
            own = {f"{self.state}_a": halves[:, :, 0].flatten(1), f"{self.state}_b": halves[:, :, 1].flatten(1)}
        else:
            own = {self.state: torch.cat([kv, score], dim=1)}
        if view.close is not None and rotation is not None:
            self._close(own, view.close, pools, rotation, x.dtype)
        for name, rows in own.items():
            pools.ring[name].write(self.layer_id, view.write, rows)

    def _close(
        self, own: dict[str, torch.Tensor], plan: EntryPlan, pools: Pools, rotation: Rotation, dtype: torch.dtype
    ) -> None:
        """Softmax-pools each closing window per channel, then norm and rope at the window's first position."""
        if plan.prev is not None:
            name_a, name_b = own
            prev = pools.ring[name_a].gather(self.layer_id, plan.prev, own[name_a])
            cur = pools.ring[name_b].gather(self.layer_id, plan.cur, own[name_b])
            prev[..., self.width :].masked_fill_(~plan.has_prev[:, None, None], float("-inf"))
            rows = torch.cat([prev, cur], dim=1)
        else:
            ((name, values),) = own.items()
            rows = pools.ring[name].gather(self.layer_id, plan.cur, values)
        kv, score = rows[..., : self.width], rows[..., self.width :]
        entry = self._as_stored(rotation.apply_(self.norm(softmax_pool(score, kv).to(dtype))))
        pools.page[self.entries].write(self.layer_id, plan.pages, plan.rows, entry[: plan.count])

    def _as_stored(self, entries: torch.Tensor) -> torch.Tensor:
        return self.numerics.kv_rows(entries, self.rope_dim)


class KeyCompressor(Compressor):
    """The compressor of a CSA layer's indexer: its entries are keys."""

    def _as_stored(self, entries: torch.Tensor) -> torch.Tensor:
        return self.numerics.index_rows(entries)


class Indexer(NumericsLayer):
    """Scores every visible CSA entry for every query and keeps the best ``index_topk``.

    Keys ``wq_b.weight``, ``weights_proj.weight`` and ``compressor.*``.
    """

    def __init__(self, config: ModelConfig, layer_id: int, row_tile: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.width, self.top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, row_tile, dtype)
        self.weights_proj = Linear(config.hidden_size, self.heads, row_tile, dtype)
        self.compressor = KeyCompressor(config, layer_id, CSA, self.width, "c4_index_state", "c4_index", row_tile)
        self.layer_id, self.row_tile = layer_id, row_tile

    def forward(
        self, x: torch.Tensor, qr: torch.Tensor, view: CompressedView, pools: Pools, rotation: Rotation
    ) -> EntryTable:
        """The entries each real row reads, in ascending order, in a multiple of :data:`ENTRY_BLOCK` columns.

        Among equal scores the earlier entry wins, so that a pick never depends on the batch.
        """
        if view.max_visible <= self.top_k:
            return view.entries
        n_rows = view.entries.mask.shape[0]
        q = self.numerics.index_rows(rotation.apply_(self.wq_b(qr).view(-1, self.heads, self.width)))
        weights = self.numerics.index_weights(self.weights_proj(x), self.width**-0.5 * self.heads**-0.5)
        tiles = [slice(i, min(i + _SCORE_ROWS, n_rows)) for i in range(0, n_rows, _SCORE_ROWS)]
        scores = torch.cat([self._score(q[t], weights[t], view.entries.part(t, slice(None)), pools) for t in tiles])
        hidden = ~view.entries.mask
        best = scores.masked_fill_(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
        best = best[:, : self.top_k]
        best = best.masked_fill(hidden.gather(1, best), _END).sort(dim=-1).values
        best = nn.functional.pad(best, (0, -best.shape[1] % ENTRY_BLOCK), value=_END)
        return view.entries.pick(best, best != _END)

    def _score(self, q: torch.Tensor, weights: torch.Tensor, entries: EntryTable, pools: Pools) -> torch.Tensor:
        """``sum_h w[h] relu(q[h] . k[i])`` for one tile of rows -> ``[rows, entries]`` in fp32."""
        keys = pools.page["c4_index"].gather(self.layer_id, entries.pages, entries.rows)
        keys = keys.view(-1, ENTRY_BLOCK, self.width)
        n_blocks = entries.mask.shape[1] // ENTRY_BLOCK
        queries = q[:, None].expand(-1, n_blocks, -1, -1).reshape(-1, self.heads, self.width)
        dots = bmm(queries, keys.transpose(1, 2), self.row_tile)
        per_block = weights[:, None].expand(-1, n_blocks, -1).reshape(-1, 1, self.heads)
        return self.numerics.index_scores(dots, per_block, self.row_tile).view(q.shape[0], -1)
