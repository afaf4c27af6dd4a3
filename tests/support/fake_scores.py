"""Log probabilities of prompt tokens as engines without a model make them up: recognisable, by prompt and position."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from server.engine.events import PromptScored
from server.engine.prompt_logprobs import empty_rows
from server.engine.request import GenerationRequest


def rows_of(prompt: Sequence[int], n_top: int, start: int = 1, stop: int | None = None) -> bytes:
    """Rows for the positions ``start .. stop - 1``, by default for all that have one."""
    positions = range(start, len(prompt) if stop is None else min(stop, len(prompt)))
    rows = empty_rows(len(positions), n_top)
    for row, position in zip(rows, positions, strict=True):
        row["logprob"], row["rank"] = -prompt[position] - position / 4096, 1 + position % 7
        for i in range(n_top):
            row["top"][i] = (prompt[position - 1] + i, -i / 8)
    return rows.tobytes()


def scored(key: Hashable, request: GenerationRequest, start: int, stop: int) -> list[PromptScored]:
    """The event of a chunk of positions ``start .. stop - 1``, whose rows are about those behind them; if any."""
    n_top = request.sampling.prompt_logprobs
    rows = b"" if n_top is None else rows_of(request.prompt_ids, n_top, start + 1, stop + 1)
    return [PromptScored(key, rows)] if rows else []
