"""The log probabilities of a prompt's own tokens: how they are kept. And how many a request may ask for, those of its
answers included.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_ENTRIES = 1 << 17
"""The most log probabilities that one request may ask for, alternatives included: of its prompts, where they are 1.5
MiB, and as many of its answers. As JSON they are about five times that, and take seconds to spell.
"""

ENTRY_NBYTES = 12
"""Of one log probability, and the rank or the token beside it."""


class PromptToken(NamedTuple):
    """One token of a prompt, as the tokens before it would have it.

    ``rank`` is its place among all tokens, from 1: first those with a larger logit, of equal ones the lower id. ``top``
    are the most likely tokens there, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """Of every token of a prompt but the first, which nothing stands before.

    ``rows`` has one packed row for each, in their order: the log probability (fp64), the rank (int32), and ``n_top``
    times a token (int32; -1: the vocabulary has no more) with its log probability (fp64), all little-endian.
    """

    n_top: int
    rows: bytes | bytearray

    def __len__(self) -> int:
        return len(self.rows) // row_nbytes(self.n_top)

    def __iter__(self) -> Iterator[PromptToken]:
        for logprob, rank, *best in struct.iter_unpack("<di" + "id" * self.n_top, self.rows):
            pairs = zip(best[::2], best[1::2], strict=True)
            yield PromptToken(logprob, rank, tuple(pair for pair in pairs if pair[0] >= 0))


@lru_cache(maxsize=32)
def row_dtype(n_top: int) -> np.dtype[np.void]:
    """One row of :class:`PromptLogprobs`."""
    best = np.dtype([("token", "<i4"), ("logprob", "<f8")])
    own = [("logprob", "<f8"), ("rank", "<i4")]
    return np.dtype([*own, ("top", best, (n_top,))] if n_top else own)


def row_nbytes(n_top: int) -> int:
    return ENTRY_NBYTES * (1 + n_top)


def over_limit(n_tokens: int, n_top: int | None, n_generations: int = 1) -> str | None:
    """Why a request may not ask for the log probabilities of its prompts, which have ``n_tokens`` together, with
    ``n_top`` alternatives for each token, in so many samples; None if it may.
    """
    n_entries = 0 if n_top is None else n_tokens * (1 + n_top) * n_generations
    if n_entries <= MAX_ENTRIES:
        return None
    samples = f" in each of {n_generations} samples" if n_generations > 1 else ""
    return (
        f"log probabilities of {n_tokens} prompt tokens with {n_top} alternatives each{samples} are {n_entries}: "
        f"at most {MAX_ENTRIES} are given"
    )


def most_answer_tokens(n_top: int, n_generations: int) -> int:
    """How long each of so many answers may be, where each token is reported with ``n_top`` alternatives."""
    return max(1, MAX_ENTRIES // ((1 + n_top) * n_generations))


def answers_over_limit(n_tokens: int, n_top: int, n_generations: int) -> str | None:
    """Why so many answers of ``n_tokens`` tokens may not be reported with ``n_top`` alternatives for each; None if they
    may.
    """
    n_entries, most = n_tokens * (1 + n_top) * n_generations, most_answer_tokens(n_top, n_generations)
    if n_tokens <= most:
        return None
    answers = f"each of {n_generations} answers" if n_generations > 1 else "the answer"
    return (
        f"log probabilities of {n_tokens} tokens of {answers} with {n_top} alternatives each are {n_entries}: "
        f"at most {MAX_ENTRIES} are given, which are {most} tokens"
    )


def empty_rows(n_rows: int, n_top: int) -> npt.NDArray[np.void]:
    """Rows to be filled, each with no token among the best."""
    rows = np.zeros(n_rows, row_dtype(n_top))
    if n_top:
        rows["top"]["token"] = -1
    return rows
