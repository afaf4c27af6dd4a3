"""The model together with its pools: runs forwards, hands over, keeps and restores state. Used by the engine thread
only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from server.cache.arena import Arena
from server.cache.device import Mark, to_device
from server.cache.digest import StateDigests, StateParts
from server.cache.handoff import Handoff, prompt_hash, read_handoff, write_handoff
from server.cache.layout import Placement
from server.cache.owners import Owner
from server.cache.snapshots import Snapshot, SnapshotPoint, restore_snapshot, take_snapshot
from server.cache.specs import Scope
from server.engine.request import TokenLogprob
from server.failure import Failure
from server.model.batch import Segment
from server.model.interface import BadStep, ForwardOutput, LoadedModel


class SharedPage(BadStep):
    """A step would write to a page that others may read. Nothing is written."""

    @property
    def failure(self) -> Failure:
        """What the request ends with."""
        return Failure("shared_page", str(self))


class ModelRunner:
    """Owns one arena and a model that computes on it. Nothing else may compute on it."""

    def __init__(self, model: LoadedModel, arena: Arena) -> None:
        self.model, self.arena = model, arena
        self._bound = model.bind(arena)

    @property
    def drafts(self) -> bool:
        """Whether the draft layer is loaded and has its state in the arena."""
        return self.model.drafts and "draft_swa" in self.arena.layout.names

    def set_threads(self, n: int) -> None:
        """How many CPU threads one operation may use."""
        self._bound.set_threads(n)

    def forward(
        self, segments: Sequence[Segment], *, every_row: bool = False, with_hidden: bool = False
    ) -> ForwardOutput:
        """One forward over runs of several requests. Logits of each segment's last row, or of every row. With
        ``with_hidden`` there is what :meth:`logits` needs of every row. Raises :class:`SharedPage`.
        """
        self._check_pages(segments)
        return self._bound.forward(segments, every_row=every_row, with_hidden=with_hidden)

    def _check_pages(self, segments: Sequence[Segment]) -> None:
        """That no position of ``segments`` lies in a page that must not be written to."""
        page_size = self.arena.layout.page_size
        for segment in segments:
            page, n_read_only = segment.start // page_size, segment.placement.read_only
            if page < n_read_only:
                where = f"position {segment.start} lies in page {page} of the request"
                raise SharedPage(-1, f"{where}, of which the first {n_read_only} may be others' too")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[rows, vocab]`` of rows of a forward's ``hidden``."""
        return self._bound.logits(hidden)

    def draft(self, segments: Sequence[Segment], streams: torch.Tensor) -> ForwardOutput:
        """One draft step. ``token_ids`` of a segment are those *after* its positions; ``streams`` ``[rows, N, D]`` of
        all rows.
        """
        return self._bound.draft(segments, streams)

    def draft_rows(self, segments: Sequence[Segment], streams: torch.Tensor) -> None:
        """The draft's window rows of a prompt, as :meth:`draft` takes them, without predicting anything."""
        self._bound.draft_rows(segments, streams)

    def state_digests(self, n: int, placement: Placement) -> StateDigests:
        """The digests of a prompt of ``n`` tokens, none of which is taken yet."""
        return StateDigests(self.arena, n, placement)

    def mark(self) -> Mark:
        """A point behind everything that was computed so far: nothing of it may be sent before that is done."""
        return Mark(self.arena.device)

    def hand_over(
        self,
        room: int,
        epoch: int,
        prompt_ids: Sequence[int],
        placement: Placement,
        first: TokenLogprob,
        streams: torch.Tensor,
        digests: StateDigests,
    ) -> StateParts:
        """Writes the hand-off row and returns the digests of all live bytes: ``digests``, of which pages
        may be taken already.

        ``streams`` ``[N, D]`` are those of position n - 1.
        """
        n = len(prompt_ids)
        row = Handoff(room, epoch, n, prompt_hash(prompt_ids), first.token_id, first.logprob, first.top, streams)
        write_handoff(self.arena, placement, row)
        self.mark().wait()
        return digests.finish()

    def check_owner(self, owner: Owner, n: int, placement: Placement) -> None:
        """That every live row after ``n`` tokens lies in ``owner``'s memory. Raises :class:`WrongOwner`."""
        self.arena.owners.check(n, placement, self.arena.layout.names, owner)

    def handed_streams(self, placement: Placement) -> torch.Tensor:
        """The streams ``[N, D]`` of the last prompt position, out of the hand-off row."""
        row = read_handoff(self.arena, placement, self.model.config.hc_mult)
        return to_device(row.streams, self.arena.device)

    def take_snapshot(self, placement: Placement, point: SnapshotPoint, streams: torch.Tensor) -> Snapshot:
        """The slot's state after ``point.n`` tokens; ``streams`` ``[N, D]`` are those of the position before."""
        self.mark().wait()
        return take_snapshot(self.arena, placement, point, streams)

    def restore_snapshot(self, placement: Placement, snapshot: Snapshot) -> torch.Tensor:
        """Makes the slot's state that of ``snapshot``. Returns the streams ``[N, D]`` of its last position.

        Raises :class:`LayoutError` for one of another size; nothing is written then.
        """
        config, dtype = self.model.config, self.model.dtype
        streams = restore_snapshot(self.arena, placement, snapshot, (config.hc_mult, config.hidden_size), dtype)
        return to_device(streams, self.arena.device)

    def page_digests(self, placement: Placement, first: int, stop: int) -> tuple[bytes, ...]:
        """Those of the request's complete pages ``first .. stop - 1``."""
        layout = self.arena.layout
        paged = [c.name for c in layout.components if c.scope is Scope.PAGE]
        n = (stop - first) * layout.page_size
        part = Placement(placement.slot, placement.pages[first:stop])
        return StateDigests(self.arena, n, part, paged).take_pages(n) if n else ()
