"""What an engine needs of a model, so that another implementation of the same network can take its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from server.cache.arena import Arena
from server.model.batch import Segment
from server.model.config import ModelConfig


class BadStep(ValueError):
    """A step that is refused before anything is written. ``row`` is the one at fault (-1: no single one)."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"row {row}: {what}" if row >= 0 else what)
        self.row = row


@dataclass(frozen=True)
class ForwardOutput:
    """``logits`` ``[wanted rows, vocab]`` in fp32; ``streams`` ``[real rows, N, D]``: the last block's output of every
    row. ``hidden`` ``[real rows, D]`` in fp32, where it was asked for: what the head makes every row's logits of.
    """

    logits: torch.Tensor
    streams: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class WeightsState:
    """Where a checkpoint's weights are. ``dequantized``: all in memory. ``packed``: in their files, and at most
    ``budget_nbytes`` of them in memory, ``loaded_nbytes`` always and ``resident_nbytes`` of what is mapped.

    Counted since the start: ``hits`` and ``misses``, pieces of weights that were in memory when they were needed and
    that were not, ``read_nbytes`` of those, ``evictions`` of pieces that had to go.
    """

    mode: str = "dequantized"
    budget_nbytes: int = 0
    loaded_nbytes: int = 0
    resident_nbytes: int = 0
    read_nbytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class BoundModel(Protocol):
    """A model that computes on one arena: its forwards read and write the pools there. Used by one thread."""

    def forward(self, segments: Sequence[Segment], *, every_row: bool, with_hidden: bool = False) -> ForwardOutput:
        """One forward over runs of several requests. Logits of each segment's last row, or of every row."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[rows, vocab]`` of rows of a forward's ``hidden``: the bits that it gives where it gives them.

        So the logits of a long prompt can be had a few rows at a time.
        """
        ...

    def draft(self, segments: Sequence[Segment], streams: torch.Tensor) -> ForwardOutput:
        """One draft step. ``token_ids`` of a segment are those *after* its positions; ``streams`` ``[rows, N, D]`` of
        all rows. Logits of each segment's last row.
        """
        ...

    def draft_rows(self, segments: Sequence[Segment], streams: torch.Tensor) -> None:
        """The draft's window rows of a prompt, as :meth:`draft` takes them, without predicting anything."""
        ...

    def set_threads(self, n: int) -> None:
        """How many CPU threads one operation may use."""
        ...


class LoadedModel(Protocol):
    """A checkpoint's weights in memory."""

    config: ModelConfig
    dtype: torch.dtype
    """Of the state and of the streams between forwards."""

    @property
    def drafts(self) -> bool:
        """Whether the draft layer is loaded."""
        ...

    def weights_state(self) -> WeightsState:
        """Where the weights are, and what was read of them. From any thread."""
        ...

    def bind(self, arena: Arena) -> BoundModel: ...
