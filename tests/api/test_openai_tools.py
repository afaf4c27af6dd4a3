"""The ``openai`` client's own helpers, over a real socket: tool loops, streams, and answers as objects."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.api.fakes import FakeBackend
from tests.chat.recorded import ANSWERS, SUM, calls

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 3 + 4?"}]


class Calculator(BaseModel):
    """One operation with two numbers."""

    a: float
    op: Literal["+", "-"]
    b: float


class Result(BaseModel):
    value: int


@pytest.fixture
def backend(deepseek: FakeBackend) -> FakeBackend:
    return deepseek


@pytest.fixture
def client(server_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server_url}/v1", api_key="unused", max_retries=0)


def tool() -> Any:
    return openai.pydantic_function_tool(Calculator, name="calculator")


def test_a_tool_loop_with_parsed_arguments(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = calls(SUM)
    completion = client.chat.completions.parse(model="tiny", messages=QUESTION, tools=[tool()])
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.parsed_arguments == Calculator(a=3, op="+", b=4)
    backend.script.answer = "It is 7."
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    answered: Any = choice.message.model_dump(exclude_none=True)
    completion = client.chat.completions.parse(
        model="tiny", messages=[*QUESTION, answered, result], tools=[tool()], tool_choice="auto"
    )
    assert completion.choices[0].message.content == "It is 7."


def test_a_stream_puts_itself_together(client: openai.OpenAI, backend: FakeBackend) -> None:
    for text, expected in ANSWERS:
        backend.script.answer = text
        kwargs = {"chat_template_kwargs": {"thinking": True}}
        options: Any = {"model": "tiny", "messages": QUESTION, "extra_body": kwargs}
        options["tools"] = [tool()]
        with client.chat.completions.stream(**options) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        assert message.tool_calls is not None
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == expected.calls
        assert (message.content or "") == expected.content
        assert (message.model_extra or {}).get("reasoning_content", "") == expected.reasoning


def test_an_answer_as_an_object(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = '{"value": 7}'
    completion = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Result)
    assert completion.choices[0].message.parsed == Result(value=7)
    [request] = backend.requests
    assert request.sampling.grammar is not None
    assert "## Response Format:" in backend.tokenizer.decode(request.prompt_ids)


def test_an_answer_as_an_object_behind_its_reasoning(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = 'I add.</think>{"value": 7}'
    completion = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Result, reasoning_effort="low"
    )
    message = completion.choices[0].message
    assert message.parsed == Result(value=7)
    assert (message.model_extra or {})["reasoning_content"] == "I add."
    [request] = backend.requests
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.kind == "lark"
    assert request.sampling.grammar.text.startswith("start: reasoning answer")


def test_a_call_that_is_forced(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = calls(SUM)
    completion = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=[tool()],
        tool_choice={"type": "function", "function": {"name": "calculator"}},
        parallel_tool_calls=False,
    )
    [call] = completion.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"a": 3, "op": "+", "b": 4}
    [request] = backend.requests
    assert request.sampling.grammar is not None
