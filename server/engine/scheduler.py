"""The requests of one engine and what the next step computes: every running request decodes, and prompts are prefilled
in chunks, first come first served. What a prompt takes over from the cache is proven before.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from server.cache.digest import StateDigests
from server.engine.choice_rules import ChoiceRules
from server.engine.events import Begin, Prefill, Resume
from server.engine.prefix import CompletedPages, TakeOver
from server.engine.speculation import ChainStart, DraftState
from server.engine.stopping import OutputProcessor
from server.model.batch import Segment


class Sequence:
    """One request in the engine. ``tokens`` are prompt and answer; the state of the first ``n_computed`` is in the
    pools.
    """

    def __init__(self, command: Begin, processor: OutputProcessor, rules: ChoiceRules) -> None:
        self.command = command
        self.key, self.request, self.placement = command.key, command.request, command.placement
        self.processor, self.rules = processor, rules
        self.tokens = list(command.request.prompt_ids)
        self.n_prompt = len(self.tokens)
        self.n_top = None if isinstance(command, Resume) else command.request.sampling.prompt_logprobs
        """With how many alternatives the prompt's tokens are scored here; None: they are not."""
        self.n_computed = 0
        self.prefill_s = 0.0
        self.draft: DraftState | None = None
        self.digests: StateDigests | None = None
        """On a prefill node, of the pages that are complete."""
        self.snapshots_at = {p.n: p for p in command.snapshots_at} if isinstance(command, Prefill) else {}
        self.take_over: TakeOver | None = None
        """Of the part of the prompt that is in the cache, until that is done."""
        self.completed: CompletedPages | None = None
        """On a decode node, the pages that decoding has completed, if they are digested."""

    @property
    def is_computed(self) -> bool:
        """Whether the state of the whole prompt is in the pools."""
        return self.n_computed >= self.n_prompt

    @property
    def next_end(self) -> int:
        """Where the next chunk ends at the latest: at the next snapshot, or at the prompt's end."""
        return self.end_from(self.n_computed + 1)

    def end_from(self, n: int) -> int:
        """The first of those ends from ``n`` tokens on."""
        return min((at for at in self.snapshots_at if at >= n), default=self.n_prompt)

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
        next_ids = self.tokens[start + 1 : self.n_computed + 1]
        return ChainStart(self.draft, start, next_ids, self.placement, n_draft, self.rules.guide)


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt to compute in this step."""

    sequence: Sequence
    n_tokens: int


class Scheduler:
    """Owns the sequences of one engine, from :meth:`add` to :meth:`remove`."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._prompts: dict[Hashable, Sequence] = {}
        self._decoding: dict[Hashable, Sequence] = {}

    @property
    def idle(self) -> bool:
        return not self._prompts and not self._decoding

    def add(self, sequence: Sequence) -> None:
        """Takes a prompt to compute, or a sequence that decodes on from one that is computed."""
        (self._decoding if sequence.is_computed else self._prompts)[sequence.key] = sequence

    def remove(self, key: Hashable) -> Sequence | None:
        """Forgets a sequence; None if it is not here any more."""
        return self._decoding.pop(key, None) or self._prompts.pop(key, None)

    def decoding(self) -> list[Sequence]:
        """All that get their next token in this step."""
        return list(self._decoding.values())

    def taking_over(self) -> Sequence | None:
        """The oldest prompt that takes over a part of it."""
        return next((sequence for sequence in self._prompts.values() if sequence.take_over is not None), None)

    def next_chunks(self) -> list[Chunk]:
        """Up to ``chunk_tokens`` of prompt, oldest prompts first; only the last one may end before the prompt, or its
        next snapshot, does.
        """
        chunks, budget = [], self._chunk_tokens
        for sequence in self._prompts.values():
            if budget == 0:
                break
            if sequence.take_over is not None:
                continue
            n_tokens = min(budget, sequence.next_end - sequence.n_computed)
            chunks.append(Chunk(sequence, n_tokens))
            budget -= n_tokens
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """The state of a chunk is in the pools; a prompt that is complete with it decodes from the next step on."""
        sequence = chunk.sequence
        sequence.n_computed += chunk.n_tokens
        if sequence.is_computed:
            self.remove(sequence.key)
            self.add(sequence)
