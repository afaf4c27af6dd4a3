"""The arrays of one step: its rows and segments as the kernels read them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from server.kernels import abi
from server.model.batch import Ints, Segment
from server.model.interface import BadStep

MAX_POSITION = 1 << 24
"""Positions below this are exact in fp32, in which angles are computed."""


class StepPlan:
    """``step`` points to the arrays of ``segments``, which live as long as the plan.

    ``page_size`` is in tokens, 0 for a step that reads no pages. Raises :class:`BadStep`.
    """

    def __init__(self, segments: Sequence[Segment], page_size: int, *, every_row: bool, threads: int) -> None:
        positions: list[int] = []
        owners: list[int] = []
        tokens: list[int] = []
        first_rows: list[int] = []
        last_rows: list[int] = []
        for i, segment in enumerate(segments):
            first, n = len(tokens), len(segment.token_ids)
            if not n or not 0 <= segment.start <= MAX_POSITION - n:
                raise BadStep(first, f"{n} tokens from position {segment.start} on are not a run below {MAX_POSITION}")
            first_rows.append(first)
            last_rows.append(first + n - 1)
            positions += range(segment.start, segment.start + n)
            owners += [i] * n
            tokens += segment.token_ids
        wanted = range(len(tokens)) if every_row else last_rows
        self.n_rows, self.n_wanted = len(tokens), len(wanted)
        self.positions, self.owners, self.tokens, self.segments = positions, owners, tokens, segments
        self._pages = self._page_table(last_rows, page_size)
        slots = [segment.placement.slot for segment in segments]
        starts = [segment.start for segment in segments]
        valid_from = [segment.valid_from for segment in segments]
        try:  # one array for all: finding its address costs more than filling it for a decode step
            self._numbers = array(
                "q", [*positions, *owners, *tokens, *slots, *starts, *first_rows, *valid_from, *wanted]
            )
        except OverflowError as error:
            raise BadStep(-1, f"a token id or a position of it: {error}") from error
        address = self._numbers.buffer_info()[0]
        per_row, per_segment = 8 * self.n_rows, 8 * len(segments)
        by_segment = address + 3 * per_row
        self.step = abi.Step(
            address,
            address + per_row,
            address + 2 * per_row,
            by_segment,
            by_segment + per_segment,
            by_segment + 2 * per_segment,
            by_segment + 3 * per_segment,
            self._pages.ctypes.data,
            by_segment + 4 * per_segment,
            self.n_rows,
            len(segments),
            self._pages.shape[1],
            self.n_wanted,
            threads,
        )

    def _page_table(self, last_rows: list[int], page_size: int) -> Ints:
        """The pages ``[segments, most of them]`` up to each segment's last position; -1 where it has none."""
        if not page_size:
            return np.empty((len(last_rows), 0), dtype=np.int64)
        counts = [self.positions[row] // page_size + 1 for row in last_rows]
        table = np.full((len(counts), max(counts, default=0)), -1, dtype=np.int64)
        for line, segment, row, count in zip(table, self.segments, last_rows, counts, strict=True):
            pages = segment.placement.page_ids
            if len(pages) < count:
                raise BadStep(
                    row, f"position {self.positions[row]} lies on page {count - 1} of a request with {len(pages)} pages"
                )
            line[:count] = pages[:count]
        return table
