"""No body that a client can send is a fault of the server: whatever JSON it is, the answer is 200, 4xx or 503."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.responses_fields import ResponsesRequest
from server.api.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from tests.api.harness import CHAT, COMPLETIONS, RESERVED, RESPONSES, post

TEXT = st.text(st.characters(categories=None) | st.sampled_from("\ud800\udfff\x00\ufffd\u2028<>{}%"), max_size=6)
NUMBERS = st.integers() | st.integers(-3, 300) | st.floats() | st.sampled_from([2**63, -(2**63) - 1, 10**400])
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
NESTED = st.integers(1, 3000).map(lambda depth: json.loads("[" * min(depth, 400) + "]" * min(depth, 400)))
VALUE = ANY | NESTED
ARGUMENTS = [*RESERVED, "tokenizer", "kwargs", "variables", "bos_token"]
KWARGS = st.dictionaries(st.sampled_from(ARGUMENTS) | TEXT, VALUE, max_size=3)
ROLE = st.sampled_from(["user", "system", "assistant", "tool"])
PART = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
ODD = {"name": VALUE, "reasoning": VALUE, "tool_calls": VALUE}
MESSAGE = st.fixed_dictionaries({"role": ROLE, "content": TEXT | st.lists(PART, max_size=3)}, optional=ODD)
ODD_MESSAGE = st.fixed_dictionaries({"role": ROLE | VALUE, "content": st.lists(PART | VALUE) | VALUE}, optional=ODD)
INPUT_PART = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": TEXT})
REASONING = st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": TEXT})
ITEM = st.one_of(
    st.fixed_dictionaries({"role": ROLE, "content": TEXT | st.lists(INPUT_PART, max_size=3)}),
    st.fixed_dictionaries({"type": st.just("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": TEXT, "output": TEXT | VALUE}),
    st.fixed_dictionaries({"type": st.just("reasoning"), "content": st.lists(REASONING, max_size=2) | VALUE}),
    st.fixed_dictionaries({"type": TEXT | VALUE}),
)
IDS = st.lists(st.integers(0, 399), min_size=1, max_size=5)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXT | IDS | st.lists(TEXT, min_size=1, max_size=4) | st.lists(IDS, min_size=1, max_size=4),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "input": TEXT | st.lists(ITEM, min_size=1, max_size=4),
}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.lists(st.integers(-1, 401) | VALUE, max_size=5)
    | st.lists(st.lists(st.integers(-1, 401) | ANY))
    | VALUE,
    "messages": st.lists(MESSAGE | ODD_MESSAGE, max_size=3) | VALUE,
    "chat_template_kwargs": KWARGS,
    "input": st.lists(ITEM | VALUE, max_size=3) | VALUE,
    "text": st.fixed_dictionaries({"format": VALUE}) | VALUE,
    "reasoning": st.dictionaries(st.sampled_from(["effort", "summary", "mode"]), VALUE) | VALUE,
}


def bodies(model: type[GenerationFields], required: str) -> st.SearchStrategy[Any]:
    names = sorted({*(field.alias or name for name, field in model.model_fields.items()), *model.refused})
    optional = {name: st.none() | FIELDS.get(name, VALUE) for name in names if name != required}
    chosen = st.lists(st.sampled_from(sorted(optional)), max_size=2, unique=True)
    some = chosen.flatmap(lambda few: st.fixed_dictionaries({name: optional[name] for name in few}))
    unknown = st.dictionaries(TEXT, VALUE, max_size=2)
    merged = st.builds(lambda a, b, c: a | b | c, unknown, some, st.fixed_dictionaries({required: GOOD[required]}))
    kwargs = st.fixed_dictionaries({required: GOOD[required], "chat_template_kwargs": KWARGS})
    return merged | kwargs | st.fixed_dictionaries({required: FIELDS[required]}) | VALUE


@pytest.mark.parametrize(
    ("path", "strategy"),
    [
        (COMPLETIONS, bodies(CompletionRequest, "prompt")),
        (CHAT, bodies(ChatCompletionRequest, "messages")),
        (RESPONSES, bodies(ResponsesRequest, "input")),
    ],
    ids=["completions", "chat", "responses"],
)
async def test_no_body_is_a_fault_of_the_server(
    client: httpx.AsyncClient, path: str, strategy: st.SearchStrategy[Any]
) -> None:
    loop = asyncio.get_running_loop()

    def ask(body: Any) -> None:
        answer = asyncio.run_coroutine_threadsafe(post(client, path, body), loop).result(60)
        assert answer.status_code < 500 or answer.status_code == 503, (body, answer.text)
        assert '"internal_error"' not in answer.text, (body, answer.text)

    @given(body=strategy)
    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(body: Any) -> None:
        ask(body)

    await loop.run_in_executor(None, check)


@pytest.mark.parametrize("name", ["name", "content", "tool_calls"])
@pytest.mark.parametrize("depth", [10, 60, 900, 100_000])
async def test_lists_in_lists_are_answered_or_refused(client: httpx.AsyncClient, name: str, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    body = f'{{"messages": [{{"role": "user", "content": "x", "{name}": {nested}}}], "max_tokens": 1}}'
    answer = await post(client, CHAT, body.encode())
    assert answer.status_code in (200, 400, 413)
