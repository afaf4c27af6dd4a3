"""What logits think of tokens that are given, as ``docs/sampling.md`` says of log probabilities.

Like the sampler it has two forms: numpy, here, and the kernels (``server/kernels/src/scores.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from server.engine.prompt_logprobs import empty_rows, row_dtype
from server.engine.sampler import NonFiniteLogits, ranked
from server.kernels.sampling import SampleKernel

PIECE_NBYTES = 8 << 20
"""Logits that are in memory at a time while a prompt is scored."""


def score_rows(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: Sequence[int],
    *,
    n_top: int,
    vocab_size: int,
    kernel: SampleKernel | None = None,
) -> bytes:
    """Rows of :class:`.PromptLogprobs`: for each row of ``hidden`` [R, D] its token, and the ``n_top`` best.

    ``logits_of`` makes logits [rows, V] of a few rows of ``hidden``: all of them together may be large.

    :raises NonFiniteLogits: names every row of the piece with a NaN, or with no finite logit.
    """
    step = max(1, PIECE_NBYTES // (4 * vocab_size))
    parts = []
    for start in range(0, len(token_ids), step):
        rows = slice(start, start + step)
        try:
            parts.append(score(logits_of(hidden[rows]), token_ids[rows], n_top, kernel))
        except NonFiniteLogits as error:
            raise NonFiniteLogits(tuple(start + row for row in error.rows)) from None
    return b"".join(parts)


def score(logits: torch.Tensor, token_ids: Sequence[int], n_top: int, kernel: SampleKernel | None = None) -> bytes:
    """Rows of :class:`.PromptLogprobs` for the rows of ``logits`` [R, V] (any float dtype, any device).

    :raises NonFiniteLogits: names every row with a NaN, or with no finite logit.
    """
    logits = logits.detach().to(device="cpu", dtype=torch.float32)
    packed = bytes(kernel.score(logits, token_ids, n_top)) if kernel else _score_in_python(logits, token_ids, n_top)
    if bad := tuple(np.flatnonzero(np.frombuffer(packed, row_dtype(n_top))["rank"] == 0).tolist()):
        raise NonFiniteLogits(bad)
    return packed


def _score_in_python(logits: torch.Tensor, token_ids: Sequence[int], n_top: int) -> bytes:
    rows = empty_rows(len(token_ids), n_top)
    for row, values, token_id in zip(rows, logits.numpy(), token_ids, strict=True):
        if not np.isfinite(values.max()):
            continue  # its rank is 0
        exact = values.astype(np.float64)
        logprobs = exact - (exact.max() + np.log(np.exp(exact - exact.max()).sum()))
        row["logprob"] = logprobs[token_id]
        own = values[token_id]
        row["rank"] = 1 + np.count_nonzero(values > own) + np.count_nonzero(values[:token_id] == own)
        if n_top:
            best = ranked(values, n_top)
            row["top"]["token"][: len(best)] = best
            row["top"]["logprob"][: len(best)] = logprobs[best]
    return rows.tobytes()
