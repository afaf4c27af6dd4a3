"""What a request forbids and demands of its answer, read before anything is generated: bad words and a grammar."""

from __future__ import annotations

from dataclasses import dataclass

from server.api.schemas import GenerationFields
from server.api.tokenizing import PromptReader
from server.engine.grammar import Grammar


@dataclass(frozen=True)
class Rules:
    """``bad_words`` as token ids, and what the answer must match, which is compiled."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


async def read_rules(reader: PromptReader, body: GenerationFields, grammar: Grammar | None = None) -> Rules:
    """The rules of a request; ``grammar`` is one that follows from other fields of it.

    :raises RequestFailed: 400 ``invalid_grammar`` with what is wrong; 503 or 504 as :meth:`.Lane.run`.
    """
    bad_words = await reader.read_words(body.bad_words or ())
    fields = body.grammar_fields
    if grammar is None and fields:
        grammar = await reader.make_grammar(body.grammar)
    if grammar is not None:
        await reader.compile(grammar, fields[0] if fields else None)
    return Rules(bad_words, grammar)
