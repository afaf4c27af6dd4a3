"""Answers to random JSON schemas, from the bundled model: they end by themselves, and every one that does is valid."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import jsonschema_rs
import pytest

from server.engine.grammar import Grammar
from server.engine.request import FinishReason, GenerationRequest, SamplingParams
from server.engine.tokenizer import Tokenizer
from server.node.options import BUNDLED_MODEL
from tests.engine.harness import Harness, outputs_of
from tests.support.json_schemas import Schema, random_schemas
from tests.support.models import load

AT_ONCE = 12
MAX_TOKENS = 512
FREQUENCY_PENALTY = 1.0
"""A small model that repeats itself would fill every text and number that has no limit."""


def requests_of(schemas: Sequence[Schema], tokenizer: Tokenizer) -> list[GenerationRequest]:
    requests = []
    for i, schema in enumerate(schemas):
        grammar = Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
        params = SamplingParams(max_tokens=MAX_TOKENS, frequency_penalty=FREQUENCY_PENALTY, grammar=grammar)
        requests.append(GenerationRequest(str(i), tuple(tokenizer.encode(f"Tom has {i} apples. As JSON:\n")), params))
    return requests


def answers_of(requests: Sequence[GenerationRequest], tokenizer: Tokenizer, k: int) -> list[tuple[str, object]]:
    """The text of each answer, and why it ended, with ``k`` drafted tokens a step."""
    harness = Harness(load(BUNDLED_MODEL, draft=True), tokenizer, k)
    answers: list[tuple[str, object]] = []
    try:
        for first in range(0, len(requests), AT_ONCE):
            batch = requests[first : first + AT_ONCE]
            events = harness.generate(batch)
            for request in batch:
                outputs = [each.output for each in outputs_of(events, request.request_id)]
                answers.append(("".join(output.text for output in outputs), outputs[-1].finish_reason))
    finally:
        harness.engine.stop()
    return answers


def finite(text: str) -> float:
    """A number of JSON, which may be beyond what a float holds."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def check(n: int, tokenizer: Tokenizer, least_ended: float) -> None:
    schemas = random_schemas(n)
    assert len(schemas) == n
    requests = requests_of(schemas, tokenizer)
    answers = answers_of(requests, tokenizer, 0)
    assert answers_of(requests, tokenizer, 3) == answers
    n_ended = 0
    for schema, (text, reason) in zip(schemas, answers, strict=True):
        if reason is FinishReason.STOP:
            n_ended += 1
            jsonschema_rs.validate(schema, json.loads(text, parse_float=finite))
    print(f"{n_ended} of {n} answers ended within {MAX_TOKENS} tokens, all of them valid")
    assert n_ended >= least_ended * n


@pytest.mark.timeout(300)
def test_answers_to_random_schemas_are_valid(tokenizer: Tokenizer) -> None:
    check(24, tokenizer, least_ended=0.5)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_nearly_all_answers_to_a_thousand_random_schemas_end_and_all_of_those_are_valid(tokenizer: Tokenizer) -> None:
    check(1000, tokenizer, least_ended=0.9)
