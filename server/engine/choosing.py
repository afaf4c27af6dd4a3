"""The tokens of one step: for each request the next one, and those behind its drafts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from server.cache.device import select_rows
from server.engine.request import TokenLogprob
from server.engine.sampler import NonFiniteLogits, RowSampling, sample
from server.engine.scheduler import Sequence
from server.kernels.sampling import SampleKernel


class NothingAllowed(Exception):
    """A request forbids every token for the next place of its answer."""


def choose(
    sequences: list[Sequence],
    drafts: list[list[int]],
    logits: torch.Tensor,
    on_failed: Callable[[Sequence, Exception], None],
    kernel: SampleKernel | None,
) -> list[list[TokenLogprob] | None]:
    """Tokens for the rows of each sequence: the next one, and the one after each of its drafted tokens, up to the
    first row at which the request itself forbids every token.

    A sequence that can have no next token gets None, and ``on_failed`` hears of it.
    If the sampler itself fails, that happens to all.
    """
    chosen: dict[int, list[TokenLogprob]] = {i: [] for i in range(len(sequences))}
    rows: list[RowSampling] = []
    owners: list[int] = []
    kept: list[int] = []
    first = 0
    for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
        try:
            rows += sequence.rules.rows(draft, len(sequence.tokens))
        except Exception as error:  # noqa: BLE001  (on_failed logs it)
            on_failed(sequence, error)
            del chosen[i]
        else:
            owners += [i] * (1 + len(draft))
            kept += range(first, first + 1 + len(draft))
        first += 1 + len(draft)
    try:
        try:
            choices = sample(logits if len(kept) == first else select_rows(logits, kept), rows, kernel)
        except NonFiniteLogits as error:
            usable = _without_bad_rows(sequences, owners, chosen, error, on_failed)
            owners = [owners[r] for r in usable]
            choices = sample(select_rows(logits, [kept[r] for r in usable]), [rows[r] for r in usable], kernel)
        for i, choice in zip(owners, choices, strict=True):
            chosen[i].append(choice)
    except Exception as error:  # noqa: BLE001  (on_failed logs it)
        for i in chosen:
            on_failed(sequences[i], error)
        chosen.clear()
    return [chosen.get(i) for i in range(len(sequences))]


def _without_bad_rows(
    sequences: list[Sequence],
    owners: list[int],
    chosen: dict[int, list[TokenLogprob]],
    error: NonFiniteLogits,
    on_failed: Callable[[Sequence, Exception], None],
) -> list[int]:
    """The rows that can be sampled. Sequences that have a broken row, or nothing to choose at the first, are taken out
    of ``chosen``, and ``on_failed`` hears of them.
    """
    broken = {owners[r] for r in error.rows if r not in error.emptied}
    last: dict[int, int] = {}  # of each sequence that runs out: the first row without a token
    for r in sorted(error.emptied, reverse=True):
        last[owners[r]] = r
    for i in list(chosen):
        first = owners.index(i)
        if i in broken:
            on_failed(sequences[i], error)
            del chosen[i]
        elif last.get(i) == first:
            on_failed(sequences[i], NothingAllowed())
            del chosen[i]
    return [r for r, i in enumerate(owners) if i in chosen and r < last.get(i, len(owners))]
