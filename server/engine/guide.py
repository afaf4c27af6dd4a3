"""Where one answer is in its grammar: which tokens may come next, also behind drafted ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher

from server.kernels.sampling import Words

CPU_S = 0.25
"""Processor time, in seconds, that a grammar may take beyond that of its tokens."""
CPU_S_PER_TOKEN = 0.005
"""For each token of an answer, with those drafted behind it. A usual grammar takes a tenth of a millisecond."""


class GrammarFailed(Exception):
    """The grammar cannot go on: a step would cost more than its limits allow, or its steps together do."""


class Budget:
    """Processor time for all answers with one grammar, which can be so ambiguous that a mask takes a tenth of a second:
    for each row of each answer, while all other requests wait. What is spent stays spent.
    """

    def __init__(self) -> None:
        self._left_s = CPU_S

    @property
    def is_spent(self) -> bool:
        return self._left_s < 0

    def add_token(self) -> None:
        """Adds what one more token may cost; nothing is saved for many later ones."""
        if not self.is_spent:
            self._left_s = min(CPU_S, self._left_s + CPU_S_PER_TOKEN)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what is done inside. Raises :class:`GrammarFailed` if nothing is left."""
        if self.is_spent:
            raise GrammarFailed("it is too ambiguous: its steps take too much time")
        began = time.thread_time()
        yield
        self._left_s -= time.thread_time() - began


class Guide:
    """One answer's place in its grammar.

    Tokens of the answer are taken by :meth:`take`. Drafted ones are looked at by :meth:`look_ahead` and :meth:`masks`,
    and forgotten again. A token that ends the answer (of ``end_ids``) is never shown to the grammar: where the answer
    may end, ``mask`` lets them through. All methods raise :class:`GrammarFailed`.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, end_ids: frozenset[int], budget: Budget | None = None
    ) -> None:
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._budget = budget or Budget()
        self._ahead: list[int] = []
        self._masks: list[Words] = []
        """For the next token, and for the one after each token of ``_ahead``."""

    def take(self, token_ids: Sequence[int]) -> bool:
        """Tokens of the answer. Returns whether nothing can follow them."""
        self._forget(0)
        self._masks.clear()
        for token_id in token_ids:
            self._budget.add_token()
            if token_id in self._end_ids:
                return True
            self._consume(token_id)
        return self._matcher.is_stopped()

    def mask(self) -> Words:
        """Which tokens may come next, behind those looked at."""
        if len(self._masks) <= len(self._ahead):
            self._masks.append(self._compute())
        return self._masks[len(self._ahead)]

    def look_ahead(self, token_id: int) -> bool:
        """Goes on as if ``token_id``, which :meth:`mask` lets through, was the next one. Returns whether another one
        may follow it.
        """
        self.mask()
        if token_id in self._end_ids:
            return False
        self._consume(token_id)
        self._ahead.append(token_id)
        return not self._matcher.is_stopped()

    def forget(self) -> None:
        """Goes back to the answer, behind which nothing is drafted."""
        self._forget(0)

    def masks(self, draft: Sequence[int]) -> list[Words]:
        """Which tokens may come next, and after each beginning of ``draft``. Behind the end, or behind a token that may
        not be there, it is what may come before it: no such row counts.
        """
        n_same = next((i for i, pair in enumerate(zip(draft, self._ahead, strict=False)) if pair[0] != pair[1]), None)
        self._forget(min(len(draft), len(self._ahead)) if n_same is None else n_same)
        masks = []
        for token_id in draft[len(self._ahead) :]:
            if not _lets_through(self.mask(), token_id) or not self.look_ahead(token_id):
                break
        self.mask()
        masks = self._masks[: 1 + len(self._ahead)]
        return masks + masks[-1:] * (1 + len(draft) - len(masks))

    def _consume(self, token_id: int) -> None:
        with self._budget.counted():
            is_taken = self._matcher.consume_token(token_id)
        if not is_taken:
            raise GrammarFailed(f"token {token_id} does not fit the grammar: {self._matcher.get_error()}")

    def _forget(self, n_kept: int) -> None:
        if len(self._ahead) > n_kept:
            if not self._matcher.rollback(len(self._ahead) - n_kept):
                raise GrammarFailed(self._matcher.get_error())
            del self._ahead[n_kept:]
            del self._masks[n_kept + 1 :]

    def _compute(self) -> Words:
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        with self._budget.counted():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarFailed(self._matcher.get_error())
        return words


def _lets_through(mask: Words, token_id: int) -> bool:
    word = token_id // 32
    return word < len(mask) and bool(mask[word] >> np.uint32(token_id % 32) & np.uint32(1))
