"""What is made ready for a request before its first token is chosen here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from server.engine.choice_rules import ChoiceRules
from server.engine.events import Begin, GrammarReady
from server.engine.guide import Guide
from server.engine.request import GenerationRequest, TokenizerLike
from server.engine.stopping import OutputProcessor


class Prepared(NamedTuple):
    """How a request's rows are sampled and how its tokens become text."""

    processor: OutputProcessor
    rules: ChoiceRules


class Preparation:
    """Prepares the requests of one engine. A grammar that is not compiled yet is compiled in another thread, which then
    sends a :class:`GrammarReady` by ``submit``.
    """

    def __init__(self, tokenizer: TokenizerLike, submit: Callable[[GrammarReady], None]) -> None:
        self._tokenizer, self._submit = tokenizer, submit
        self._early: dict[Hashable, Prepared] = {}
        self._waiting: dict[Hashable, Begin] = {}

    def prepare(self, key: Hashable, request: GenerationRequest) -> None:
        """``request`` is to begin later, unless it is forgotten before."""
        grammar = request.sampling.grammar
        guide = None if grammar is None else self._tokenizer.grammars.guide(grammar)
        if grammar is None or guide is not None:
            self._early[key] = self._prepared(request, guide)

    def begin(self, command: Begin) -> Prepared | None:
        """What ``command`` needs; None if its grammar is compiled first."""
        early = self._early.pop(command.key, None)
        grammar = command.request.sampling.grammar
        if early is not None or grammar is None:
            return early or self._prepared(command.request, None)
        guide = self._tokenizer.grammars.guide(grammar)
        if guide is None:
            self._waiting[command.key] = command
            self._tokenizer.grammars.guide_soon(grammar, lambda guide: self._submit(GrammarReady(command, guide)))
            return None
        return self._prepared(command.request, guide)

    def grammar_ready(self, ready: GrammarReady) -> Prepared | None:
        """What its command needs; None if nobody waits for it any more. Raises the error of a grammar that cannot be
        compiled.
        """
        if self._waiting.get(ready.command.key) is not ready.command:
            return None
        del self._waiting[ready.command.key]
        if isinstance(ready.guide, Exception):
            raise ready.guide
        return self._prepared(ready.command.request, ready.guide)

    def forget(self, key: Hashable) -> Begin | None:
        """Nothing is prepared for ``key`` any more. Returns the command that waited for its grammar, if one did."""
        self._early.pop(key, None)
        return self._waiting.pop(key, None)

    def _prepared(self, request: GenerationRequest, guide: Guide | None) -> Prepared:
        params, prompt_ids = request.sampling, request.prompt_ids
        processor = OutputProcessor(self._tokenizer, params, prompt_ids, guide)
        return Prepared(processor, ChoiceRules(params, prompt_ids, processor, guide))
