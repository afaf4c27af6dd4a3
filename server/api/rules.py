"""What a request forbids and demands of its answer, read before anything is generated: bad words and a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from server.api.schemas import GenerationFields
from server.api.tokenizing import PromptReader
from server.chat.reasoning_grammar import behind_reasoning
from server.engine.grammar import Grammar


@dataclass(frozen=True)
class Rules:
    """``bad_words`` as token ids, and what the answer must match, which is compiled."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


async def read_rules(
    reader: PromptReader, body: GenerationFields, grammar: Grammar | None = None, reasoning_rule: str | None = None
) -> Rules:
    """The rules of a request; ``grammar`` is that of calls which it forces. What the fields of grammars say
    holds behind the reasoning, if there is a ``reasoning_rule``, of :func:`.reasoning_rule`.

    :raises RequestFailed: 400 ``invalid_grammar`` with what is wrong; 503 or 504 as :meth:`.Lane.run`.
    """
    bad_words = await reader.read_words(body.bad_words or ())
    field = "tool_choice"
    if grammar is None and (fields := body.grammar_fields):
        field = fields[0]
        grammar = await reader.make_grammar(partial(_grammar_of, body, reasoning_rule))
    if grammar is not None:
        await reader.compile(grammar, field)
    return Rules(bad_words, grammar)


def _grammar_of(body: GenerationFields, reasoning_rule: str | None) -> Grammar | None:
    grammar = body.grammar()
    return grammar if grammar is None or reasoning_rule is None else behind_reasoning(reasoning_rule, grammar)
