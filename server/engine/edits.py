"""What changes single logits before a token is chosen: penalties, biases and bans, counted token by token."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from server.engine.request import SamplingParams
from server.kernels.sampling import EDIT, Words

Table = npt.NDArray[np.void]
"""Edits of :data:`.EDIT`, each token once: how often the answer has it (0: only the prompt does, -1: penalties do not
apply), and its bias.
"""
Reals = npt.NDArray[np.float32]


class TokenEdits:
    """The edits of one request. Its work follows the tokens that are added, not those that are there.

    ``banned`` are tokens that are never chosen.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], banned: Iterable[int] = ()) -> None:
        self._counts_answer = has_penalty(params)
        biases = dict(params.logit_bias) | dict.fromkeys(banned, -math.inf)
        prompt = np.unique(np.asarray(prompt_ids, np.int64)) if params.repetition_penalty != 1.0 else np.empty(0)
        entries = dict.fromkeys(biases, -1) | dict.fromkeys(prompt.tolist(), 0)
        self._places = {token_id: place for place, token_id in enumerate(entries)}
        self._rows = np.array([(token_id, n, biases.get(token_id, 0.0)) for token_id, n in entries.items()], EDIT)

    @property
    def are_any(self) -> bool:
        """Whether there are edits, or may ever be."""
        return self._counts_answer or bool(self._places)

    @property
    def table(self) -> Table | None:
        """The edits for the next token. It is another one after :meth:`take`."""
        return self._rows[: len(self._places)] if self._places else None

    def take(self, token_ids: Iterable[int]) -> None:
        """Counts tokens of the answer."""
        if self._counts_answer:
            for token_id in token_ids:
                place = self._places.get(token_id)
                if place is None:
                    place = self._add(token_id)
                self._rows["count"][place] = max(self._rows["count"][place], 0) + 1

    def ahead(self, draft: Sequence[int]) -> list[Table | None]:
        """For the token after each beginning of ``draft``, the shortest first: the edits that are then other ones."""
        tables: list[Table | None] = [None]
        if not self._counts_answer:
            return tables * (1 + len(draft))
        changed: dict[int, tuple[int, int, float]] = {}
        for token_id in draft:
            _, count, bias = changed.get(token_id) or self._edit(token_id)
            changed[token_id] = (token_id, max(count, 0) + 1, bias)
            tables.append(np.array(list(changed.values()), EDIT))
        return tables

    def _edit(self, token_id: int) -> tuple[int, int, float]:
        place = self._places.get(token_id)
        return (token_id, 0, 0.0) if place is None else tuple(self._rows[place].tolist())

    def _add(self, token_id: int) -> int:
        place = self._places[token_id] = len(self._places)
        if place >= len(self._rows):
            rows = np.zeros(2 * place + 16, EDIT)
            rows[:place] = self._rows
            self._rows = rows
        self._rows[place] = (token_id, 0, 0.0)
        return place


def has_penalty(params: SamplingParams) -> bool:
    """Whether what was chosen before changes what is chosen next."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


@functools.lru_cache(maxsize=256)
def bans(token_ids: frozenset[int]) -> Table:
    """Edits that ban tokens."""
    return np.array([(token_id, -1, -np.inf) for token_id in sorted(token_ids)], EDIT)


def mask_of(token_ids: Iterable[int]) -> Words:
    """The mask that lets ``token_ids`` (at least one) through."""
    ids = np.fromiter(token_ids, np.int64)
    words = np.zeros(int(ids.max()) // 32 + 1, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words


def apply(logits: Reals, params: SamplingParams, tables: Iterable[Table | None], mask: Words | None) -> Reals:
    """The edited logits [V] of one row. Of several edits of one token the one of the last table counts."""
    values = logits.copy()
    for table in tables:
        if table is not None:
            table = table[(table["token"] >= 0) & (table["token"] < len(logits))]
            values[table["token"]] = _edited(logits[table["token"]], table, params)
    if mask is not None:
        bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little", count=len(logits))
        values[bits == 0] = -np.inf
    return values


def _edited(values: Reals, table: Table, params: SamplingParams) -> Reals:
    """The logits of the tokens of ``table``."""
    counts, biases = table["count"], table["bias"]
    repetition = np.float32(params.repetition_penalty)
    presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
    with np.errstate(all="ignore"):
        penalized = np.where(values > 0, values / repetition, values * repetition)
        values = np.where(counts >= 0, penalized, values)
        values = np.where(counts > 0, values - (frequency * counts.astype(np.float32) + presence), values)
        return np.where(np.isneginf(biases), biases, values + biases)
