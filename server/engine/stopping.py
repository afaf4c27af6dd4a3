"""When a generation ends, and exactly which tokens and which text it has then."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from server.engine.detokenizer import Detokenizer
from server.engine.guide import Guide
from server.engine.request import FinishReason, SamplingParams, TokenizerLike, TokenLogprob, TokenOutput


class OutputProcessor:
    """Follows one request from token ids to finished text.

    :meth:`feed` takes the tokens of one step, one or several. Tokens are looked at one by one, so that the result is
    the same however they are grouped; those after the end are dropped. ``finish_reason`` is set from the end on.

    The rules, with ``i`` the index of a generated token:

    - A token that ends the generation (EOS unless ``ignore_eos``, or one of ``stop_token_ids``) is counted and its id
      is reported, but its text is not.
    - A stop string ends the text exactly before it; the token that completes it is the last one. Of several stop
      strings the one that is complete first counts, of those the longest. Text that may yet become one is held back.
    - Neither ends anything at ``i < min_tokens``; the sampler must not choose :meth:`banned_ids` there.
    - A grammar ends the answer behind the token that completes it; where it may go on, EOS does, also with
      ``ignore_eos``.
    - At ``max_tokens`` tokens all text is given out. A stop at the same token has precedence.

    A log probability is reported with its token's place in the text, as soon as that is certain: a token inside of what
    may become a stop string waits for that, however the tokens are grouped. With the last output all are reported.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        sampling: SamplingParams,
        prompt_ids: Sequence[int] = (),
        guide: Guide | None = None,
    ) -> None:
        self._sampling = sampling
        self._guide = guide
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, with_offsets=sampling.logprobs is not None)
        self._stops = StopStrings(sampling.stop)
        self._eos_ids = frozenset() if sampling.ignore_eos and guide is None else tokenizer.eos_token_ids
        self._end_ids = self._eos_ids | frozenset(sampling.stop_token_ids)
        self._n_chars = 0  # of the text that was given out
        self._offset = 0  # of the last token
        self._unplaced: deque[TokenLogprob] = deque()
        self.n_generated = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def banned_ids(self, n_ahead: int = 0) -> frozenset[int]:
        """Ids that the token ``n_ahead`` behind the next one may not be: they would end it before ``min_tokens``."""
        return self._end_ids if self.n_generated + n_ahead < self._sampling.min_tokens else frozenset()

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> TokenOutput | None:
        """Takes the next tokens, with one of ``logprobs`` for each if the request asked for them.

        Returns what they add, or None if that is nothing (no tokens, or the generation has ended before).
        """
        taken = 0
        text = ""
        wanted = self._sampling.logprobs is not None
        for token_id in token_ids:
            if self.finished:
                break
            new = self._take(token_id)
            text += new
            self._n_chars += len(new)
            if wanted:
                self._note(logprobs[taken])
            taken += 1
        if not taken:
            return None
        return TokenOutput(
            token_ids=tuple(token_ids[:taken]),
            text=text,
            logprobs=self._placed() if wanted else (),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            completes_prompt=bool(text) and self._n_chars == len(text) and self._detokenizer.completes_context,
        )

    def _take(self, token_id: int) -> str:
        may_stop = self.n_generated >= self._sampling.min_tokens
        self.n_generated += 1
        if may_stop and token_id in self._end_ids:
            text = self._finish(FinishReason.STOP, None if token_id in self._eos_ids else token_id)
            self._offset = self._detokenizer.n_chars
            return text
        text = self._stops.feed(self._detokenizer.feed(token_id), may_stop)
        self._offset = self._detokenizer.offset
        if self._stops.found is not None:
            return text + self._finish_at_stop_string()
        if self._guide is not None and self._guide.take((token_id,)):
            return text + self._finish(FinishReason.STOP, None)
        if self.n_generated >= self._sampling.max_tokens:
            return text + self._finish(FinishReason.LENGTH, None)
        return text

    def _note(self, logprob: TokenLogprob) -> None:
        """Keeps a log probability until its token's place is certain. One that was noted behind this token's place was
        measured by text that has not come: it belongs here too.
        """
        self._limit_places(self._offset)
        self._unplaced.append(replace(logprob, text_offset=self._offset))

    def _limit_places(self, end: int) -> None:
        for i in reversed(range(len(self._unplaced))):
            if self._unplaced[i].text_offset <= end:
                return
            self._unplaced[i] = replace(self._unplaced[i], text_offset=end)

    def _placed(self) -> tuple[TokenLogprob, ...]:
        """The log probabilities of tokens that begin in the text given out, or right behind it; at the end all."""
        if self.finished:
            self._limit_places(self._n_chars)
        placed = []
        while self._unplaced and self._unplaced[0].text_offset <= self._n_chars:
            placed.append(self._unplaced.popleft())
        return tuple(placed)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> str:
        """Ends the generation and gives out what was held back; this may be the end of a stop string after all."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        text = self._stops.feed(self._detokenizer.flush(), may_stop=self.n_generated > self._sampling.min_tokens)
        if self._stops.found is not None:
            return text + self._finish_at_stop_string()
        return text + self._stops.flush()

    def _finish_at_stop_string(self) -> str:
        self.finish_reason = FinishReason.STOP
        self.stop_reason = self._stops.found
        return ""


class StopStrings:
    """Looks for stop strings in a text that comes in parts, one pass over every character (Knuth-Morris-Pratt).

    ``found`` is the stop string that ended the text, if any.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # chars of each stop string that the end of the text so far matches
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The part of the text so far that is certain to stay. ``may_stop`` false: nothing that ends here is found."""
        if not self._stops:
            return text
        held = self._held + text
        for n_seen, char in enumerate(text, start=len(self._held) + 1):
            complete = self._step(char)
            if may_stop and complete:
                self.found = max(complete, key=len)
                self._held = ""
                return held[: n_seen - len(self.found)]
        n_open = max(self._matched)
        self._held = held[len(held) - n_open :]
        return held[: len(held) - n_open]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> list[str]:
        """Takes one character; returns the stop strings that it completes."""
        complete = []
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            n = self._matched[i]
            while n and stop[n] != char:
                n = borders[n]
            if stop[n] == char:
                n += 1
            if n == len(stop):
                complete.append(stop)
                n = borders[n]
            self._matched[i] = n
        return complete


def _borders(pattern: str) -> list[int]:
    """For every length n of a prefix: the length of the longest proper prefix that is also a suffix of that prefix."""
    borders = [0] * (len(pattern) + 1)
    n = 0
    for i in range(1, len(pattern)):
        while n and pattern[i] != pattern[n]:
            n = borders[n]
        if pattern[i] == pattern[n]:
            n += 1
        borders[i + 1] = n
    return borders
