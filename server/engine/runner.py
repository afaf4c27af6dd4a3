"""The model together with its pools: runs forwards, hands over and scrubs state. Used by the engine thread only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from server.cache.arena import Arena
from server.cache.digest import live_digests
from server.cache.handoff import Handoff, prompt_hash, write_handoff
from server.cache.layout import Placement
from server.engine.request import TokenLogprob
from server.model.batch import Segment, build_batch
from server.model.network import DeepseekV4, ForwardOutput
from server.model.pools import Pools


class ModelRunner:
    """Owns one model and one arena. Nothing else may compute on either."""

    def __init__(self, model: DeepseekV4, arena: Arena) -> None:
        self.model, self.arena = model, arena
        self._pools = Pools(arena)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], *, every_row: bool = False) -> ForwardOutput:
        """One forward over runs of several requests. Logits of each segment's last row, or of every row."""
        batch = build_batch(segments, self.arena.layout, self.model.row_tile, self.arena.device)
        output: ForwardOutput = self.model(batch, self._pools, None if every_row else batch.last_rows)
        return output

    def synchronize(self) -> None:
        """Waits until everything computed so far is in memory: nothing may be sent before that."""
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(self.arena.device)

    def hand_over(
        self,
        room: int,
        epoch: int,
        prompt_ids: Sequence[int],
        placement: Placement,
        first: TokenLogprob,
        streams: torch.Tensor,
    ) -> dict[str, int]:
        """Writes the hand-off row and returns the digest of every component's live bytes. ``streams`` ``[N, D]`` of
        row n - 1.
        """
        n = len(prompt_ids)
        row = Handoff(room, epoch, n, prompt_hash(prompt_ids), first.token_id, first.logprob, first.top, streams)
        write_handoff(self.arena, placement, row)
        self.synchronize()
        return live_digests(self.arena, n, placement)

    def scrub(self, placement: Placement) -> None:
        self.arena.scrub(placement)
