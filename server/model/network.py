"""The backbone: embedding, blocks between hyper-connected streams, head; and its NextN draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from server.cache.arena import Arena
from server.model.attention import RopeSet
from server.model.batch import Batch, Segment, build_batch, build_draft_batch
from server.model.block import Block, NextN
from server.model.config import ModelConfig
from server.model.interface import ForwardOutput, WeightsState
from server.model.layers import HeadCollapse, Linear, RMSNorm, pad_rows
from server.model.numerics import PLAIN, Numerics, use_numerics
from server.model.pools import Pools
from server.model.rope import rope_frequencies
from server.model.stored import StoredCheckpoint


class DeepseekV4(nn.Module):
    """The target model and, with ``draft``, its NextN layer (keys ``mtp.0.*``), which shares the embedding and the
    head.

    ``row_tile`` > 0 makes every row's result independent of the batch (see ``layers.matmul_rows``); ``numerics`` is the
    arithmetic of all layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        row_tile: int,
        *,
        draft: bool = False,
        numerics: Numerics = PLAIN,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.row_tile, self.numerics = config, dtype, row_tile, numerics
        # nn.Embedding() draws its weights, and on the meta device torch imports its compiler for that: over a second
        self.embed: nn.Module = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        )
        self.layers = nn.ModuleList(
            [Block(config, i, ratio, row_tile, dtype) for i, ratio in enumerate(config.compress_ratios)]
        )
        self.hc_head = HeadCollapse(config.hc_mult, config.hidden_size, config.hc_eps, config.rms_norm_eps, row_tile)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, row_tile, torch.float32)
        self.mtp = nn.ModuleList([NextN(config, row_tile, dtype)] if draft else [])
        self.stored: StoredCheckpoint | None = None
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None
        use_numerics(self, numerics)

    @property
    def nextn(self) -> NextN | None:
        """The draft layer, if it was loaded."""
        layer = next(iter(self.mtp), None)
        return layer if isinstance(layer, NextN) else None

    @property
    def drafts(self) -> bool:
        return bool(self.mtp)

    def weights_state(self) -> WeightsState:
        return WeightsState() if self.stored is None else self.stored.state()

    def bind(self, arena: Arena) -> PythonModel:
        """This model over the pools of ``arena``."""
        return PythonModel(self, arena)

    def forward(
        self, batch: Batch, pools: Pools, rows: torch.Tensor | None = None, *, with_hidden: bool = False
    ) -> ForwardOutput:
        """Runs one batch, reading and writing ``pools``. ``rows`` are those whose logits are wanted; None: every real
        row.
        """
        rope = self._rope_set(batch)
        streams = self.embed(batch.token_ids).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for block in self.layers:
            streams = block(streams, batch, pools, rope)
        output = self._output(streams, batch, rows, self.hc_head, self.norm)
        if not with_hidden:
            return output
        return replace(output, hidden=self.norm(self.hc_head(streams)).float()[: batch.n_rows])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[rows, vocab]`` of rows of a forward's ``hidden``."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def draft(self, batch: Batch, streams: torch.Tensor, pools: Pools) -> ForwardOutput:
        """One draft step. Row t takes ``streams`` ``[real rows, N, D]`` of position t and token t + 1, and predicts t +
        2.

        Logits are those of each segment's last row.
        """
        nextn = self._nextn()
        mixed = nextn.mix(self.embed(batch.token_ids), pad_rows(streams, self.row_tile))
        out = nextn(mixed, batch, pools, self._rope_set(batch))
        return self._output(out, batch, batch.last_rows, nextn.hc_head, nextn.norm)

    def draft_rows(self, batch: Batch, streams: torch.Tensor, pools: Pools) -> None:
        """Writes the draft's window rows of a prompt: they depend on (streams of t, token t + 1) alone."""
        nextn = self._nextn()
        mixed = nextn.mix(self.embed(batch.token_ids), pad_rows(streams, self.row_tile))
        nextn.write_window(mixed, batch, pools, self._rope_set(batch))

    def _nextn(self) -> NextN:
        if self.nextn is None:
            raise RuntimeError("this model was loaded without its draft layer")
        return self.nextn

    def _rope_set(self, batch: Batch) -> RopeSet:
        if self._rope is None:
            main, compress = rope_frequencies(self.config)
            self._rope = main.to(batch.positions.device), compress.to(batch.positions.device)
        return RopeSet(batch, *self._rope)

    def _output(
        self, streams: torch.Tensor, batch: Batch, rows: torch.Tensor | None, collapse: HeadCollapse, norm: RMSNorm
    ) -> ForwardOutput:
        n_rows = batch.n_rows if rows is None else rows.shape[0]
        picked = streams if rows is None else pad_rows(streams[rows], self.row_tile)
        logits = self.head(norm(collapse(picked)).float())
        return ForwardOutput(logits[:n_rows], streams[: batch.n_rows])


class PythonModel:
    """A :class:`DeepseekV4` bound to one arena (see :class:`.interface.BoundModel`)."""

    def __init__(self, model: DeepseekV4, arena: Arena) -> None:
        self._model, self._arena, self._pools = model, arena, Pools(arena, model.config, model.dtype)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], *, every_row: bool, with_hidden: bool = False) -> ForwardOutput:
        batch = build_batch(segments, self._arena.layout, self._model.row_tile, self._arena.device)
        rows = None if every_row else batch.last_rows
        output: ForwardOutput = self._model(batch, self._pools, rows, with_hidden=with_hidden)
        return output

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    @torch.inference_mode()
    def draft(self, segments: Sequence[Segment], streams: torch.Tensor) -> ForwardOutput:
        return self._model.draft(self._draft_batch(segments), streams, self._pools)

    @torch.inference_mode()
    def draft_rows(self, segments: Sequence[Segment], streams: torch.Tensor) -> None:
        self._model.draft_rows(self._draft_batch(segments), streams, self._pools)

    def set_threads(self, n: int) -> None:
        # threads make the model cut operations into parts, which on a GPU are no faster, but many
        torch.set_num_threads(n if self._arena.device.type == "cpu" else 1)

    def _draft_batch(self, segments: Sequence[Segment]) -> Batch:
        return build_draft_batch(segments, self._arena.layout, self._model.row_tile, self._arena.device)
