"""What the next step computes.

Every running request decodes; prompts are prefilled in chunks, first come first served.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from server.cache.layout import Placement
from server.cache.owners import Owner
from server.engine.request import GenerationRequest
from server.engine.speculation import ChainStart, DraftState
from server.engine.stopping import OutputProcessor
from server.model.batch import Segment


class Goal(enum.Enum):
    """What a sequence is here for: its prompt only (prefill node), or an answer."""

    HAND_OVER = "hand over"
    ANSWER = "answer"


@dataclass
class Sequence:
    """One request in the engine. ``tokens`` are prompt and answer; the state of the first ``n_computed`` is in the
    pools.
    """

    key: Hashable
    request: GenerationRequest
    placement: Placement
    goal: Goal
    processor: OutputProcessor
    tokens: list[int]
    n_computed: int = 0
    room: int = 0
    epoch: int = 0
    owner: Owner | None = None
    prefill_s: float = 0.0
    draft: DraftState | None = None

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)

    def segment(self, n_tokens: int) -> Segment:
        """The next ``n_tokens`` whose state is not computed yet."""
        stop = self.n_computed + n_tokens
        return Segment(self.tokens[self.n_computed : stop], self.n_computed, self.placement)

    def verify_segment(self, draft: list[int]) -> Segment:
        """The last token and the drafted ones behind it."""
        return Segment([*self.tokens[self.n_computed :], *draft], self.n_computed, self.placement)

    def chain_start(self, spec_tokens: int) -> ChainStart | None:
        """Where a draft chain of at most ``spec_tokens`` begins; None if the next token is the last anyway."""
        n_draft = min(spec_tokens, self.request.sampling.max_tokens - self.processor.n_generated - 1)
        if self.draft is None or n_draft < 1:
            return None
        start = self.n_computed - self.draft.streams.shape[0]
        return ChainStart(self.draft, start, self.tokens[start + 1 : self.n_computed + 1], self.placement, n_draft)


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt to compute in this step."""

    sequence: Sequence
    n_tokens: int

    @property
    def completes(self) -> bool:
        return self.sequence.n_computed + self.n_tokens == self.sequence.n_prompt


class Scheduler:
    """The sequences of one engine: prompts in arrival order, and those that decode."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.prefilling: deque[Sequence] = deque()
        self.decoding: dict[Hashable, Sequence] = {}

    @property
    def idle(self) -> bool:
        return not self.prefilling and not self.decoding

    def next_chunks(self) -> list[Chunk]:
        """Up to ``chunk_tokens`` of prompt, oldest prompts first; only the last one may be left unfinished."""
        chunks, budget = [], self.chunk_tokens
        for sequence in self.prefilling:
            if budget == 0:
                break
            n_tokens = min(budget, sequence.n_prompt - sequence.n_computed)
            chunks.append(Chunk(sequence, n_tokens))
            budget -= n_tokens
        return chunks

    def find(self, key: Hashable) -> Sequence | None:
        if key in self.decoding:
            return self.decoding[key]
        return next((sequence for sequence in self.prefilling if sequence.key == key), None)

    def drop(self, key: Hashable) -> None:
        """Forgets a sequence, wherever it is."""
        self.decoding.pop(key, None)
        self.prefilling = deque(sequence for sequence in self.prefilling if sequence.key != key)
