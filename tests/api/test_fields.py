"""No field of a request is dropped in silence: honoured, harmless, refused by name, or named as ignored."""

from __future__ import annotations

from typing import Any

import httpx
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completions
import openai.types.responses.response_create_params as openai_responses
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.fields import (
    HARMLESS,
    HARMLESS_IN_RESPONSES,
    IGNORED_HEADER,
    MAX_IGNORED_CHARS,
    ignored_fields,
    ignored_header,
)
from server.api.responses_fields import ResponsesRequest
from server.api.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from tests.api.fakes import FakeBackend
from tests.api.harness import CHAT, COMPLETIONS, HELLO, MINIMAL, RESPONSES, chat, complete, error_of, post

ROUTES = [
    (COMPLETIONS, MINIMAL[COMPLETIONS], CompletionRequest),
    (CHAT, MINIMAL[CHAT], ChatCompletionRequest),
    (RESPONSES, MINIMAL[RESPONSES], ResponsesRequest),
]


def openai_fields(module: Any) -> set[str]:
    name = "Response" if module is openai_responses else "Completion"
    kinds = [getattr(module, f"{name}CreateParams{kind}") for kind in ("NonStreaming", "Streaming")]
    return {name for kind in kinds for base in (kind, *kind.__orig_bases__) for name in base.__annotations__}


@pytest.mark.parametrize(
    ("module", "schema"),
    [
        (openai_completions, CompletionRequest),
        (openai_chat, ChatCompletionRequest),
        (openai_responses, ResponsesRequest),
    ],
)
def test_every_field_of_the_openai_package_is_accounted_for(module: Any, schema: type[GenerationFields]) -> None:
    fields = openai_fields(module)
    assert {"model", "stream", "temperature", "user"} <= fields  # the package is read rightly
    honoured = {field.alias or name for name, field in schema.model_fields.items()}
    harmless = HARMLESS | HARMLESS_IN_RESPONSES if schema is ResponsesRequest else HARMLESS
    assert fields - honoured - schema.refused.keys() - harmless == set()


ONLY_IN_CHAT = {"parallel_tool_calls", "separate_reasoning", "stream_reasoning"}
"""Honoured there; a completion has neither calls nor reasoning that they could be about."""


CHATS = {"max_tokens", "max_completion_tokens", "response_format", "n", "prompt_logprobs"}
"""A response has other names for them, or cannot have them: they are refused there."""


def test_no_field_has_two_fates() -> None:
    honoured = set(ResponsesRequest.model_fields)
    assert honoured & ResponsesRequest.refused.keys() == CHATS
    assert honoured & HARMLESS == {"user", "parallel_tool_calls", "metadata", "store"}
    assert not (HARMLESS | HARMLESS_IN_RESPONSES) & ResponsesRequest.refused.keys()
    for schema in (CompletionRequest, ChatCompletionRequest):
        honoured = set(schema.model_fields) - {"user", "best_of"}  # their types and values are checked all the same
        assert not honoured & schema.refused.keys()
        assert honoured & HARMLESS == (ONLY_IN_CHAT if schema is ChatCompletionRequest else set())
        assert not HARMLESS & schema.refused.keys()


WOULD_CHANGE_THE_ANSWER: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "repetition_penalty": 0,
    "length_penalty": 0.9,
    "min_p": 0.1,
    "spaces_between_special_tokens": False,
    "skip_special_tokens": False,
    "include_reasoning": False,
    "thinking_token_budget": 0,
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "verbosity": "low",
    "response_format": {"type": "json_object"},
    "min_new_tokens": 4,
    "truncate_prompt_tokens": 0,
    "best_of": 2,
}
"""Values for fields that are not simply something or nothing; the others get one below."""


@pytest.mark.parametrize(("path", "required", "schema"), ROUTES)
async def test_every_field_that_is_not_built_is_refused_by_name(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, required: Any, schema: type[GenerationFields]
) -> None:
    for name in schema.refused:
        value = WOULD_CHANGE_THE_ANSWER.get(name, path != COMPLETIONS if name == "add_special_tokens" else ["a"])
        error = error_of(await client.post(path, json={**required, name: value}), 400)
        assert (error["param"], error["code"]) == (name, "unsupported")
        assert name in error["message"]
    assert backend.generations == []


@pytest.mark.parametrize("name", ["web_search_options", "audio"])
async def test_an_empty_object_is_a_value(client: httpx.AsyncClient, name: str) -> None:
    error = error_of(await complete(client, **{name: {}}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported")


DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "length_penalty": 1,
    "min_p": 0.0,
    "logit_bias": {},
    "bad_words": [],
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "tools": [],
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "return_token_ids": False,
    "modalities": ["text"],
    "stop_regex": None,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "priority": 7,
    "temperature": 0,
    "stream": False,
    "ignore_eos": False,
}
"""What clients and routers send although it is nothing but the default, or changes nothing."""


@pytest.mark.parametrize(("path", "required", "schema"), ROUTES)
async def test_defaults_that_clients_spell_out_change_nothing(
    client: httpx.AsyncClient, path: str, required: Any, schema: type[GenerationFields]
) -> None:
    own: dict[str, Any] = {"add_special_tokens": True}
    if path == CHAT:
        own = {"add_special_tokens": False, "echo": False, "logprobs": False, "continue_final_message": False}
    if path == RESPONSES:
        own = {"add_special_tokens": False, "echo": False, "top_logprobs": 0, "truncation": "disabled"}
        own["response_format"] = None
    answer = await client.post(path, json={**required, **DEFAULTS, **own})
    assert answer.status_code == 200, answer.text
    assert IGNORED_HEADER not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "required", "schema"), ROUTES)
async def test_fields_that_nobody_knows_are_answered_and_named(
    client: httpx.AsyncClient, path: str, required: Any, schema: type[GenerationFields], stream: bool
) -> None:
    body = {**required, "stream": stream, "zoom": 3, "a\r\nb: ü": 1}
    if stream:
        body["stream_options"] = {"include_usage": True, "include_obfuscation": False, "zoom": 1}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "zoom,a??b???" + (",stream_options.zoom" if stream else "")


def test_the_names_of_other_routes_are_not_known() -> None:
    assert ignored_fields({"messages": [], "prompt": "x"}, CompletionRequest.model_fields) == ["messages"]


@given(st.lists(st.text(max_size=80), max_size=40))
def test_the_header_of_ignored_fields_is_short_and_clean(names: list[str]) -> None:
    body = dict.fromkeys(names, 1)
    for value in ignored_header(ignored_fields(body, ())).values():
        assert 0 < len(value) <= MAX_IGNORED_CHARS
        assert value.isascii()
        assert value.isprintable()


async def test_a_million_unknown_fields_are_cut_short(client: httpx.AsyncClient) -> None:
    answer = await complete(client, **{f"unknown_{i}": 0 for i in range(4000)})
    assert answer.status_code == 200
    assert len(answer.headers[IGNORED_HEADER]) <= MAX_IGNORED_CHARS
    assert answer.headers[IGNORED_HEADER].endswith("...")


async def test_what_the_chat_template_does_not_read_is_refused_or_named(client: httpx.AsyncClient) -> None:
    # the template of this tokenizer reads add_generation_prompt and thinking
    answer = await chat(client, chat_template_kwargs={"thinking": True, "colour": 1})
    assert answer.headers[IGNORED_HEADER] == "chat_template_kwargs.colour"
    answer = await chat(client, messages=[{**HELLO[0], "name": "Tom"}])
    assert answer.headers[IGNORED_HEADER] == "messages.name"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    error = error_of(await chat(client, messages=[HELLO[0], call]), 400)
    assert (error["param"], error["code"]) == ("messages", "unsupported")
    assert "tool_calls" in error["message"]


@pytest.mark.parametrize("field", ["model", "prompt"])
async def test_an_error_quotes_little_of_what_a_client_sent(client: httpx.AsyncClient, field: str) -> None:
    body = {"prompt": "x", **({"model": "m" * 90_000} if field == "model" else {"prompt": [{"a" * 90_000: 1}]})}
    answer = await post(client, COMPLETIONS, body)
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 3000
    huge = {"role": "r" * 90_000, "content": None}
    assert len(error_of(await post(client, CHAT, {"messages": [huge]}), 400)["message"]) <= 2000
