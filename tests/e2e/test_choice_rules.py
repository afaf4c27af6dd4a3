"""Penalties, bans and grammars give the same answer from a pair as from one node, with and without drafts: the prefill
node chooses the first token by them.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from server.engine.grammar import Grammar
from server.engine.request import FinishReason, GenerationRequest, TokenOutput
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.model.interface import LoadedModel
from server.node.options import BUNDLED_MODEL
from tests.support.models import load
from tests.support.pair import Pair, Side, a_request, answer, running_decode, running_pair

OBJECT = Grammar(
    "json_schema",
    json.dumps({"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}}, "required": ["b"]}),
)
RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": ((20, 5.0), (30, 5.0))},
    {"min_p": 0.3, "temperature": 1.5, "seed": 4},
    {"allowed_token_ids": tuple(range(50, 80)), "frequency_penalty": 0.5},
    {"grammar": OBJECT},
    {"grammar": OBJECT, "temperature": 1.0, "seed": 8},
    {"grammar": Grammar("regex", "(x|yy)+z"), "repetition_penalty": 1.2},
]
LENGTHS = [1, 127, 128, 129, 256, 257]


def requests() -> list[GenerationRequest]:
    prompts = [random.Random(n).choices(range(10, 500), k=n) for n in LENGTHS]
    return [
        a_request(prompts[i % len(prompts)], max_tokens=24, logprobs=2, **rules)
        for i, rules in enumerate(RULES + RULES[::-1])
    ]


def texts_of(outputs: list[TokenOutput]) -> str:
    return "".join(output.text for output in outputs)


def told(outputs: list[TokenOutput]) -> list[Any]:
    """What is the same however the tokens are grouped."""
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [logprob for output in outputs for logprob in output.logprobs]
    return [tokens, logprobs, texts_of(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason]


@pytest.fixture(scope="module")
def with_draft() -> LoadedModel:
    return load(BUNDLED_MODEL, draft=True)


async def test_a_pair_answers_as_one_node_does(with_draft: LoadedModel, tokenizer: Tokenizer) -> None:
    asked = requests()
    async with running_decode(with_draft, tokenizer, Side(permute_seed=3), None) as (_, local):
        expected = [told((await answer(local, request))[0]) for request in asked]
    drafting = Side(spec_tokens=3, draft=True)
    for p, d in ((Side(), Side(permute_seed=2)), (drafting, replace(drafting, permute_seed=2))):
        async with running_pair(with_draft, tokenizer, p, d) as pair:
            for request, one in zip(asked, expected, strict=True):
                assert told((await pair.answer(request))[0]) == one, request.sampling
            await pair.settled()
    for request, one in zip(asked, expected, strict=True):
        if request.sampling.grammar == OBJECT and one[3] is FinishReason.STOP:
            assert "b" in json.loads(one[2])


async def check_refusal(pair: Pair, code: str, **sampling: Any) -> None:
    with pytest.raises(RequestFailed) as failure:
        await pair.answer(a_request([5, 6, 7], **sampling))
    assert failure.value.code == code
    assert failure.value.kind == "request", "it is the client's fault, and no other prefill node is tried"
    await pair.settled()


async def test_what_the_prefill_node_cannot_follow_is_the_client_s_fault(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    async with running_pair(model, tokenizer) as pair:
        await check_refusal(pair, "no_token_allowed", grammar=OBJECT, allowed_token_ids=(300,))
        await check_refusal(pair, "invalid_grammar", grammar=Grammar("regex", "(a"))
        await check_refusal(pair, "bad_sampling", min_p=2.0)
