"""Incremental detokenization: text that is certain, as soon as it is certain, and never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.request import TokenizerLike

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
_STALLED_TOKENS = 12
"""A character is at most 4 bytes and so at most 4 tokens: text that is open for longer than this is not UTF-8."""
_MAX_SILENT_TOKENS = 16
"""How many tokens without any text (special ones) may pile up before the text in front of them is forgotten."""


class Detokenizer:
    """Turns one request's tokens into text, a token at a time.

    It decodes a short window of the last tokens and gives out what this adds to the window's text. The window begins
    with the tokens of the last finished piece of text, since the spelling of a token may depend on the ones before it;
    it stays short, so that a token's cost does not grow with the answer. A trailing U+FFFD may be the beginning of a
    character whose other bytes are in tokens to come, so it is held back until it is settled or until :meth:`flush`.
    All given parts together equal the decoded whole.

    ``context_ids`` (the prompt) only tells how the first token is spelt; its text is not given out, except for a
    character that the prompt leaves unfinished.
    """

    def __init__(self, tokenizer: TokenizerLike, context_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context_ids[-_CONTEXT_TOKENS:])
        self._settled_tokens = len(self._window)  # all text of this many tokens at the window's start is given out
        self._given = len(tokenizer.decode(self._window).rstrip(REPLACEMENT)) if self._window else 0  # in chars

    def feed(self, token_id: int) -> str:
        """The text that is certain now and was not before (often empty within a multi-byte character)."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        n_open = len(text) - len(text.rstrip(REPLACEMENT))
        if n_open and len(self._window) - self._settled_tokens > _STALLED_TOKENS:
            return self._feed_stalled(text)
        new = self._give(text[: len(text) - n_open])
        if not n_open:
            self._settle()
        return new

    def flush(self) -> str:
        """The text still held back, with U+FFFD for a character that was never finished."""
        return self._give(self._tokenizer.decode(self._window)) if self._window else ""

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new

    def _settle(self) -> None:
        """All text is given out: let the window begin with what was last added."""
        added = self._window[self._settled_tokens :]
        added_text = self._tokenizer.decode(added)
        if added_text or len(added) > _MAX_SILENT_TOKENS:
            self._window = added
            self._given = len(added_text)
            self._settled_tokens = len(added)

    def _feed_stalled(self, text: str) -> str:
        """The bytes are no UTF-8: only the last U+FFFD can still become a character, the others are final."""
        tail = self._window[-_CONTEXT_TOKENS:]
        tail_text = self._tokenizer.decode(tail)
        n_open = 1 if tail_text.endswith(REPLACEMENT) else 0
        new = self._give(text[: len(text) - n_open])
        self._window = tail
        self._given = len(tail_text) - n_open
        self._settled_tokens = 0
        return new
