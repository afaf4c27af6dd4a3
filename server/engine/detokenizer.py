"""Incremental detokenization: text that is certain, as soon as it is certain, and never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.request import TokenizerLike

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
_MAX_CHAR_TOKENS = 4
"""A character is at most 4 bytes and so at most 4 tokens."""
_STALLED_TOKENS = 12
"""Text that is open for longer than this is not UTF-8."""
_MAX_SILENT_TOKENS = 16
"""How many tokens without any text (special ones) may pile up before the text in front of them is forgotten."""

_MAX_WINDOW_TOKENS = 24


class Detokenizer:
    """Turns one request's tokens into text, a token at a time.

    It decodes a short window of the last tokens and gives out what this adds to the window's text. The window begins
    with the tokens of the last finished piece of text, since the spelling of a token may depend on the ones before it;
    it stays short, so that a token's cost does not grow with the answer. A trailing U+FFFD may be the beginning of a
    character whose other bytes are in tokens to come, so it is held back until it is settled or until :meth:`flush`.
    All given parts together equal the decoded whole.

    ``context_ids`` (the prompt) only decides how the first tokens are spelt. Its text is never given out: the answer is
    the text of prompt and answer together, less the prompt's own. A character that the prompt has begun and the answer
    finishes is the answer's: it takes the place of the prompt's last U+FFFD, and ``completes_context`` is set.

    ``n_chars`` counts the characters given out. ``offset`` is where the text of the last token begins among all that
    were or will be given out; for a part of a character, where that character is. It is certain up to ``n_chars``.
    Nobody may look at it where ``with_offsets`` is false.
    """

    def __init__(self, tokenizer: TokenizerLike, context_ids: Sequence[int] = (), *, with_offsets: bool = True) -> None:
        self._tokenizer = tokenizer
        self._with_offsets = with_offsets
        self._window = self._context_of(context_ids)
        self._text = self._decode(self._window)
        self._settled_tokens = len(self._window)  # all text of this many tokens at the window's start is given out
        self._given = len(self._text)  # in chars of the window's text; the context's text is as good as given out
        self._context: list[int] | None = list(self._window)  # until the first text is given out
        self.n_chars = 0
        self.offset = 0
        self.completes_context = False

    def feed(self, token_id: int) -> str:
        """The text that is certain now and was not before (often empty within a multi-byte character)."""
        before = self._text
        self._window.append(token_id)
        text = self._text = self._decode(self._window)
        if self._context is not None:
            self._find_context(self._context)
        if self._with_offsets:
            self._find_offset(token_id, before)
        n_open = len(text) - len(text.rstrip(REPLACEMENT))
        if n_open and len(self._window) - self._settled_tokens > _STALLED_TOKENS:
            return self._feed_stalled()
        new = self._give(len(text) - n_open)
        if not n_open:
            self._settle()
        return new

    def flush(self) -> str:
        """The text still held back, with U+FFFD for a character that was never finished."""
        return self._give(len(self._text))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids)) if ids else ""

    def _context_of(self, ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, so many that they do not begin inside a character where that can be helped."""
        for n_more in range(_MAX_CHAR_TOKENS):
            window = list(ids[-_CONTEXT_TOKENS - n_more :])
            ends = range(len(window), max(0, len(window) - _MAX_CHAR_TOKENS), -1)
            if any(not self._decode(window[:end]).startswith(REPLACEMENT) for end in ends):
                return window
        return list(ids[-_CONTEXT_TOKENS:])

    def _find_context(self, context: Sequence[int]) -> None:
        """How much of the window's text is the context's: all that it had, less a character that is finished only now
        (bytes that are no character by themselves may be spelt otherwise as well).
        """
        for n_tokens in range(len(context), -1, -1):
            part = self._decode(context[:n_tokens])
            if self._text.startswith(part):
                self._given = len(part)
                self.completes_context = n_tokens < len(context)
                return

    def _find_offset(self, token_id: int, before: str) -> None:
        place = len(before) if self._text.startswith(before) else _n_common(before, self._text)
        if place == len(before) and before.endswith(REPLACEMENT):
            begins_broken = self._decode([token_id]).startswith(REPLACEMENT)
            if begins_broken and not self._text.startswith(REPLACEMENT, place):
                place -= 1  # its first byte is one more of the same character
        self.offset = self.n_chars + max(0, place - self._given)

    def _give(self, end: int) -> str:
        new = self._text[self._given : end]
        self._given = max(self._given, end)
        self.n_chars += len(new)
        if new:
            self._context = None
        return new

    def _settle(self) -> None:
        """All text is given out: let the window begin with what was last added."""
        added = self._window[self._settled_tokens :]
        added_text = self._decode(added)
        if added_text.startswith(REPLACEMENT) and len(self._window) <= _MAX_WINDOW_TOKENS:
            self._settled_tokens = len(self._window)  # not here: it would begin inside a character
        elif added_text or len(added) > _MAX_SILENT_TOKENS:
            self._let_begin(added, added_text, n_open=0)
            self._settled_tokens = len(added)

    def _feed_stalled(self) -> str:
        """The bytes are no UTF-8: only the last U+FFFD can still become a character, the others are final."""
        tail = self._window[-_CONTEXT_TOKENS:]
        tail_text = self._decode(tail)
        n_open = 1 if tail_text.endswith(REPLACEMENT) else 0
        new = self._give(len(self._text) - n_open)
        self._let_begin(tail, tail_text, n_open)
        self._settled_tokens = 0
        return new

    def _let_begin(self, window: list[int], text: str, n_open: int) -> None:
        self._window, self._text = window, text
        self._given = len(text) - n_open
        self._context = None


def _n_common(a: str, b: str) -> int:
    """The number of characters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
