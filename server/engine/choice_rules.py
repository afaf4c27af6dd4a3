"""What one request's parameters make of its rows, kept up to date token by token: see ``docs/sampling.md``."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.edits import TokenEdits, mask_of
from server.engine.guide import Guide
from server.engine.request import SamplingParams
from server.engine.sampler import RowSampling
from server.engine.stopping import OutputProcessor
from server.kernels.sampling import Words


class ChoiceRules:
    """How the rows of one request are sampled. ``processor`` says what may not end its answer yet, and shows the tokens
    of the answer to ``guide``, if there is one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        processor: OutputProcessor,
        guide: Guide | None = None,
    ) -> None:
        self.guide = guide
        self._params, self._processor = params, processor
        single = [word[0] for word in params.bad_words if len(word) == 1]
        self._edits = TokenEdits(params, prompt_ids, single)
        self._bad_words = BadWords([word for word in params.bad_words if len(word) > 1])
        self._allowed = None if params.allowed_token_ids is None else mask_of(params.allowed_token_ids)
        self._answer: list[int] = []
        self._is_plain = not (self._edits.are_any or self._bad_words or self._allowed is not None or guide is not None)
        """Nothing but the bans of the processor changes the rows: nearly every request, at every step."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Counts tokens of the answer."""
        if not self._is_plain:
            self._answer.extend(token_ids)
            self._edits.take(token_ids)

    def rows(self, draft: Sequence[int], position: int) -> list[RowSampling]:
        """For the next token, at ``position``, and for the one after each token of ``draft``.

        :raises GrammarFailed: the grammar cannot go on.
        """
        params, seed = self._params, self._params.seed or 0
        if self._is_plain:
            banned = self._processor.banned_ids
            return [RowSampling(params, seed, position + j, banned(j)) for j in range(1 + len(draft))]
        edits = self._edits.table
        own = self._edits.ahead(draft)
        masks = self._masks(draft)
        return [
            RowSampling(params, seed, position + j, self._banned(draft[:j]), edits, own[j], masks[j])
            for j in range(1 + len(draft))
        ]

    def _masks(self, draft: Sequence[int]) -> Sequence[Words | None]:
        if self.guide is None:
            return [self._allowed] * (1 + len(draft))
        masks = self.guide.masks(draft)
        if self._allowed is None:
            return masks
        n = min(len(self._allowed), len(masks[0]))
        return [mask[:n] & self._allowed[:n] for mask in masks]

    def _banned(self, ahead: Sequence[int]) -> frozenset[int]:
        ends = self._processor.banned_ids(len(ahead))
        return ends | self._bad_words.completed_by(self._answer, ahead) if self._bad_words else ends


class BadWords:
    """Words of several tokens, of which an answer may have all but the last token."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._by_last_but_one: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            self._by_last_but_one.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def __bool__(self) -> bool:
        return bool(self._by_last_but_one)

    def completed_by(self, answer: Sequence[int], ahead: Sequence[int]) -> frozenset[int]:
        """The tokens that would complete one of the words behind ``answer`` and ``ahead``."""
        last = ahead[-1] if ahead else answer[-1] if answer else -1
        found = set()
        for beginning, last_id in self._by_last_but_one.get(last, ()):
            n = len(beginning)
            tail = [*answer[max(0, len(answer) - n) :], *ahead][-n:]
            if tail == beginning:
                found.add(last_id)
        return frozenset(found)
