"""``POST /v1/responses``: what is refused, named as ignored and honoured, and the bytes of its stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from server.api import bodies
from server.api.chat_fields import MAX_TOOLS
from server.api.fields import IGNORED_HEADER
from server.api.schemas import MAX_MESSAGES
from tests.api.deepseek import CALCULATOR, deepseek_backend
from tests.api.fakes import ANSWER, FakeBackend
from tests.api.harness import RESPONSES, client_of, error_of, post

TOOL = {"type": "function", **CALCULATOR["function"]}


@pytest.fixture
async def asks(deepseek: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(deepseek) as client:
        yield client


async def ask(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await post(client, RESPONSES, {"model": "tiny", "input": "How many?", **body})


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no items": ({"input": []}, "input"),
    "no input": ({"input": None}, "input"),
    "a number": ({"input": [1]}, "input"),
    "too many items": ({"input": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}, "input"),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    "a type that is none": ({"input": [{"type": {}}]}, "input"),
    "a role": ({"input": [{"role": "tool", "content": "x"}]}, "input"),
    "no content": ({"input": [{"role": "user"}]}, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    "a part without text": ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
    "no call_id": ({"input": [{**CALL, "call_id": None}]}, "input"),
    "no name": ({"input": [{**CALL, "name": ""}]}, "input"),
    "arguments": ({"input": [{**CALL, "arguments": {}}]}, "input"),
    "no output": ({"input": [CALL, {"type": "function_call_output", "call_id": "1"}]}, "input"),
    "reasoning": ({"input": [{"type": "reasoning", "content": "x"}]}, "input"),
    "surrogate": ({"input": "\ud800"}, "input"),
    "chat's tools": ({"tools": [CALCULATOR]}, "tools"),
    "other tools": ({"tools": [{"type": "web_search"}]}, "tools"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools"),
    "too many tools": ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
    "chat's choice": ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    "allowed tools": ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    "an unknown choice": ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    "a choice of nothing": ({"tool_choice": "required"}, "tool_choice"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    "a schema that is none": ({"text": {"format": SCHEMA}}, "text.format"),
    "no object": ({"text": {"format": {**SCHEMA, "schema": 1}}}, "text.format.schema"),
    "two formats": ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "effort": ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    "mode": ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    "turns": ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    "nothing to generate": ({"max_output_tokens": 0}, "max_output_tokens"),
    "too much to generate": ({"max_output_tokens": 5000}, "max_output_tokens"),
    "too long": ({"input": "x " * 5000}, "input"),
    "metadata": ({"metadata": {"a": 1}}, "metadata.a"),
    "log probabilities": ({"include": ["message.output_text.logprobs"]}, "include"),
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a stream's options": ({"stream_options": {}}, "stream_options"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_is_refused_by_its_own_name(
    asks: httpx.AsyncClient, deepseek: FakeBackend, name: str
) -> None:
    body, param = WRONG[name]
    error = error_of(await ask(asks, **body), 400)
    assert error["param"] == param
    for word in ("messages", "response_format", "max_tokens", "max_completion_tokens", "reasoning_effort"):
        assert word not in error["message"]
    assert deepseek.generations == []


async def test_what_the_format_of_the_chat_cannot_say_is_refused(client: httpx.AsyncClient) -> None:
    # this template knows neither tools nor calls, and thinks, but not how much
    assert error_of(await ask(client, tools=[TOOL]), 400)["param"] == "tools"
    error = error_of(await ask(client, input=[CALL]), 400)
    assert (error["param"], error["code"]) == ("input", "unsupported")
    assert error["message"].startswith("input: tool_calls")
    answer = await ask(client, reasoning={"effort": "low"})
    assert answer.headers[IGNORED_HEADER] == "reasoning.effort"


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{**TOOL, "parameters": {"type": "object", "x": float("nan")}}], "tool_choice": "none"},
        {"tools": [{**TOOL, "description": "\ud800"}], "tool_choice": "none"},
        {"metadata": {"a": "\udfff"}},
        {"user": "\ud800"},
    ],
)
async def test_what_cannot_be_repeated_in_an_answer_is_refused(asks: httpx.AsyncClient, body: dict[str, Any]) -> None:
    for stream in (False, True):
        assert error_of(await ask(asks, **body, stream=stream), 400)["code"] == "invalid_text"


async def test_what_has_no_effect_is_named(asks: httpx.AsyncClient) -> None:
    answer = await ask(
        asks,
        input=[{"role": "user", "content": "x", "id": "1", "zoom": 2}, {"type": "reasoning", "encrypted_content": "x"}],
        store=True,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "medium", "colour": 1},
        zoom=3,
    )
    assert answer.status_code == 200, answer.text
    names = "zoom,store,include.reasoning.encrypted_content,reasoning.summary,text.colour"
    assert answer.headers[IGNORED_HEADER] == f"{names},input.zoom,input.encrypted_content"
    assert answer.json()["store"] is False


async def test_defaults_that_clients_spell_out_change_nothing(asks: httpx.AsyncClient) -> None:
    answer = await ask(
        asks,
        store=False,
        stream=False,
        background=False,
        truncation="disabled",
        previous_response_id=None,
        include=[],
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        max_tool_calls=3,
        top_logprobs=0,
        service_tier="auto",
        prompt_cache_key="x",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        reasoning={"effort": None, "summary": None},
        n=1,
    )
    assert answer.status_code == 200, answer.text
    assert IGNORED_HEADER not in answer.headers
    assert answer.json()["output"][0]["content"][0]["text"] == ANSWER


async def test_sampling_fields_of_the_other_routes_are_honoured(asks: httpx.AsyncClient, deepseek: FakeBackend) -> None:
    await ask(asks, seed=3, top_k=5, min_p=0.1, stop="42", logit_bias={"7": 2}, top_p=0.5)
    sampling = deepseek.requests[0].sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p, sampling.stop) == (3, 5, 0.1, ("42",))
    assert (sampling.top_p, sampling.logit_bias) == (0.5, ((7, 2.0),))


async def test_a_stream_has_named_events_of_ascii_and_no_done(asks: httpx.AsyncClient) -> None:
    answer = await ask(asks, stream=True, instructions="ü\u2028")
    assert answer.content.isascii()
    pieces = [piece.split("\n") for piece in answer.text.removesuffix("\n\n").split("\n\n")]
    for name, data in pieces:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    last = json.loads(pieces[-1][1].removeprefix("data: "))
    assert last["type"] == "response.completed"
    assert last["response"]["instructions"] == "ü\u2028"
    assert last["response"]["pd"]["room"] == answer.headers["x-pd-room"]
    assert last["response"]["id"] == f"resp_{answer.headers['x-request-id']}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_request_is_answered_as_a_small_one(
    deepseek: FakeBackend, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("server.api.responses.INLINE_NBYTES", 10)
    monkeypatch.setattr(bodies, "INLINE_NBYTES", 10)
    monkeypatch.setattr("server.api.requests.INLINE_ENTRIES", 0)
    async with client_of(deepseek, CollectorRegistry()) as client:
        answer = await ask(client, instructions="x" * 500, stream=stream)
        assert answer.status_code == 200, answer.text
        assert "x" * 500 in answer.text
        assert error_of(await ask(client, metadata={"a": "\udfff"}, stream=stream), 400)["code"] == "invalid_text"


async def test_a_prefill_node_wants_a_room(directory: Path) -> None:
    backend = deepseek_backend(directory)
    backend.role = "prefill"
    async with client_of(backend) as client:
        error_of(await ask(client), 400)
        answer = await ask(client, bootstrap_host="h", bootstrap_port=1, bootstrap_room=7, stream=True)
        assert answer.status_code == 200, answer.text
        assert "response.incomplete" in answer.text
    assert [request.sampling.max_tokens for request in backend.requests] == [1]
