"""Grammars made ready for a tokenizer, by ``llguidance``: within limits, outside of the engine and the event loop."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.engine.grammar import JSON_WHITESPACE, Grammar, check_length
from server.engine.guide import Budget, GrammarFailed, Guide
from server.failure import Failure, RequestFailed

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # the module itself does not have it

MAX_KEPT = 64
"""Grammars that are kept after their last use."""
LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
"""Those of the library, which end a compilation after a good second and a step after a tenth of one, with less memory.
An error does not repeat the answer.
"""
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}
_MAX_REASON_CHARS = 600


class GrammarCompiler:
    """Compiles grammars for one tokenizer (``settings`` is its JSON) and keeps those of late. Its methods may be called
    from any thread.
    """

    def __init__(self, settings: str, eos_token_ids: frozenset[int]) -> None:
        self._settings, self._eos_token_ids = settings, eos_token_ids
        self._lock = threading.Lock()  # held for moments only
        self._compiled: OrderedDict[Grammar, tuple[LLMatcher, Budget]] = OrderedDict()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile grammar")

    def is_ready(self, grammar: Grammar) -> bool:
        """Whether it is compiled; if so, it is kept as one that was just used."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return grammar in self._compiled

    def compile(self, grammar: Grammar) -> None:
        """Makes ``grammar`` ready, in the calling thread. Without the interpreter's lock, for up to a second or so.

        :raises RequestFailed: 400 ``invalid_grammar`` says what is wrong with it; ``unsupported``.
        """
        if self.is_ready(grammar):
            return
        matcher = self._matcher(grammar)
        with self._lock:
            self._compiled[grammar] = matcher, Budget()
            while len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)

    def guide_soon(self, grammar: Grammar, on_end: Callable[[Guide | Exception], object]) -> None:
        """Calls ``on_end`` with a new answer's place in ``grammar``, or with what :meth:`compile` raises, in a thread
        of its own that compiles one grammar after the other.
        """

        def run() -> None:
            try:
                self.compile(grammar)
                guide = self.guide(grammar)
                on_end(guide if guide is not None else RuntimeError("a grammar is gone in the moment it is compiled"))
            except Exception as error:  # noqa: BLE001  (whoever waits for it is told)
                on_end(error)

        self._thread.submit(run)

    def guide(self, grammar: Grammar) -> Guide | None:
        """A new answer's place in ``grammar``; None if that is not compiled, or not any more. Its processor time is
        that of all answers with this grammar, until it is spent.
        """
        with self._lock:
            if grammar not in self._compiled or self._tokenizer is None:
                return None
            self._compiled.move_to_end(grammar)
            matcher, budget = self._compiled[grammar]
            if budget.is_spent:
                budget = Budget()
                self._compiled[grammar] = matcher, budget
            return Guide(matcher.deep_copy(), self._tokenizer.vocab_size, self._eos_token_ids, budget)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        try:
            check_length(grammar.text)
        except ValueError as error:
            raise RequestFailed(Failure("invalid_grammar", str(error))) from error
        tokenizer = self._read_tokenizer()
        try:
            matcher = LLMatcher(tokenizer, _text_for_library(grammar), log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            Guide(matcher, tokenizer.vocab_size, self._eos_token_ids).mask()  # fails early, and is faster from now on
        except (ValueError, GrammarFailed) as error:
            reason = f"the {grammar.kind} cannot be followed: {error}"
            raise RequestFailed(Failure("invalid_grammar", reason[:_MAX_REASON_CHARS])) from error
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        """Made when it is first needed: for a large vocabulary it takes about a second."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                if not self._eos_token_ids:
                    reason = "grammars are not supported: the checkpoint names no token that ends an answer"
                    raise RequestFailed(Failure("unsupported", reason))
                try:
                    self._tokenizer = LLTokenizer(self._settings, eos_token=sorted(self._eos_token_ids))
                except ValueError as error:
                    reason = f"grammars are not supported with this tokenizer: {error}"
                    raise RequestFailed(Failure("unsupported", reason[:_MAX_REASON_CHARS])) from error
            return self._tokenizer


def _text_for_library(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
