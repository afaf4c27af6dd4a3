"""Tools and thinking in chat completions, with a checkpoint that has the tokens of DeepSeek-V4 and no template."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.chat_fields import MAX_TOOL_CHARS, MAX_TOOL_DEPTH, MAX_TOOLS
from server.api.fields import IGNORED_HEADER
from server.chat.deepseek_v4 import ASSISTANT, END_THINK, THINK
from server.engine.grammar import MAX_GRAMMAR_CHARS
from server.engine.request import SamplingParams
from tests.api.deepseek import CALCULATOR
from tests.api.fakes import FakeBackend
from tests.api.harness import CHAT, HELLO, backend_of, chat, client_of, error_of, events
from tests.chat.parsing import Answer
from tests.chat.recorded import ANSWERS, SUM, SUM_CALL, WEATHER, calls

TOOLS = [CALCULATOR, {"type": "function", "function": {"name": "get_weather"}}]
THINKING = {"chat_template_kwargs": {"thinking": True}}


@pytest.fixture
def backend(deepseek: FakeBackend) -> FakeBackend:
    return deepseek


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


def prompt(backend: FakeBackend, which: int = -1) -> str:
    return str(backend.tokenizer.decode(backend.requests[which].prompt_ids))


@dataclass
class Streamed(Answer):
    """What the chunks of one choice say, put together."""

    finish_reason: str | None = None
    ids: list[str] = field(default_factory=list)
    n_logprobs: int = 0

    def take(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert (call["index"], call["type"], call["function"]["arguments"]) == (len(self.calls), "function", "")
                self.ids.append(call["id"])
                self.calls.append((call["function"]["name"], ""))
            else:
                name, arguments = self.calls[call["index"]]
                self.calls[call["index"]] = (name, arguments + call["function"]["arguments"])
        assert self.finish_reason is None
        self.finish_reason = choice["finish_reason"]
        self.n_logprobs += len((choice["logprobs"] or {"content": ()})["content"])


async def streamed(client: httpx.AsyncClient, n: int = 1, **body: Any) -> list[Streamed]:
    answers = [Streamed() for _ in range(n)]
    for chunk in (await events(client, CHAT, messages=HELLO, n=n, **body))[:-1]:
        for choice in chunk["choices"]:
            answers[choice["index"]].take(choice)
    return answers


def of_message(choice: dict[str, Any]) -> Answer:
    message = choice["message"]
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return Answer(message.get("reasoning_content", ""), message["content"] or "", called)


@pytest.mark.parametrize("tokens_a_step", [1, 4])
async def test_recorded_answers_whole_and_streamed(
    client: httpx.AsyncClient, backend: FakeBackend, tokens_a_step: int
) -> None:
    backend.script.tokens_a_step = tokens_a_step
    for text, expected in ANSWERS:
        backend.script.answer = text
        body: dict[str, Any] = {"tools": TOOLS, "logprobs": True, **THINKING}
        [choice] = (await chat(client, **body)).json()["choices"]
        [answer] = await streamed(client, **body)
        assert of_message(choice) == expected
        assert Answer(answer.reasoning, answer.content, answer.calls) == expected
        assert choice["finish_reason"] == answer.finish_reason == "tool_calls"
        assert choice["message"]["content"] == (expected.content or None)
        assert len(set(answer.ids)) == len(expected.calls)
        assert answer.n_logprobs == len(choice["logprobs"]["content"]) == len(backend.tokenizer.encode(text))


async def test_cut_by_max_tokens_whole_and_streamed(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    text, whole = ANSWERS[2]
    backend.script.answer = text
    for n_tokens in range(1, len(backend.tokenizer.encode(text)), 3):
        body: dict[str, Any] = {"tools": TOOLS, "max_tokens": n_tokens, **THINKING}
        [choice] = (await chat(client, **body)).json()["choices"]
        [answer] = await streamed(client, **body)
        assert choice["finish_reason"] == answer.finish_reason == "length"
        assert of_message(choice) == Answer(answer.reasoning, answer.content, answer.calls)
        assert whole.reasoning.startswith(answer.reasoning)
        assert whole.content.startswith(answer.content)


async def test_every_sample_has_its_own_calls(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.answer = calls(SUM, WEATHER)
    answers = await streamed(client, n=3, tools=TOOLS)
    assert [len(answer.calls) for answer in answers] == [2, 2, 2]
    assert len({call_id for answer in answers for call_id in answer.ids}) == 6


async def test_a_tool_loop(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.answer = "I add." + calls(SUM)
    message = (await chat(client, tools=TOOLS)).json()["choices"][0]["message"]
    assert "### Available Tool Schemas" in prompt(backend)
    assert prompt(backend).endswith(ASSISTANT + END_THINK)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
    backend.script.answer = "It is 7."
    answer = await chat(client, tools=TOOLS, messages=[*HELLO, message, result])
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "It is 7.", "refusal": None}
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert IGNORED_HEADER not in answer.headers  # refusal: null says nothing
    assert f"I add.{calls(SUM)}" in prompt(backend)
    assert f"<tool_result>7</tool_result>{ASSISTANT}{END_THINK}" in prompt(backend)


async def test_without_tools_there_are_no_calls(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.answer = calls(SUM)
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await chat(client, **body)).json()["choices"][0]
        assert choice["message"]["content"] == calls(SUM)
        assert choice["finish_reason"] == "stop"
        assert "Available Tool" not in prompt(backend)


async def test_one_call_where_calls_are_not_parallel(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.answer = calls(SUM, WEATHER)
    choice = (await chat(client, tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
    assert of_message(choice) == Answer("", "", [SUM_CALL])


@pytest.mark.parametrize(
    ("body", "is_thinking"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "max", "chat_template_kwargs": {"thinking": False}}, False),
    ],
)
async def test_what_makes_it_think(
    client: httpx.AsyncClient, backend: FakeBackend, body: dict[str, Any], is_thinking: bool
) -> None:
    backend.script.answer = "a</think>b"
    answer = await chat(client, **body)
    assert prompt(backend).endswith(ASSISTANT + (THINK if is_thinking else END_THINK))
    expected = Answer("a", "b") if is_thinking else Answer("", "a</think>b")
    assert of_message(answer.json()["choices"][0]) == expected
    assert IGNORED_HEADER not in answer.headers


async def test_how_reasoning_is_shown(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.answer = "a b c d</think>e"
    shown: list[tuple[dict[str, Any], Answer]] = [
        ({}, Answer("a b c d", "e")),
        ({"separate_reasoning": True, "stream_reasoning": False}, Answer("a b c d", "e")),
        ({"separate_reasoning": False}, Answer("", "a b c d</think>e")),
        ({"include_reasoning": False}, Answer("", "e")),
    ]
    for body, expected in shown:
        [answer] = await streamed(client, **{**THINKING, **body})
        assert Answer(answer.reasoning, answer.content) == expected
        assert of_message((await chat(client, **body, **THINKING)).json()["choices"][0]) == expected
    chunks = await events(client, CHAT, messages=HELLO, stream_reasoning=False, **THINKING)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["a b c d"]


async def test_the_highest_effort_is_written(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await chat(client, reasoning_effort="max")
    assert "Reasoning Effort: Absolute maximum" in prompt(backend)


async def test_the_last_message_goes_on(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.answer = " more"
    said = {"role": "assistant", "content": "Tom has", "reasoning_content": "think"}
    answer = await chat(client, messages=[*HELLO, said], continue_final_message=True)
    assert prompt(backend).endswith(f"{ASSISTANT}{END_THINK}Tom has")
    assert answer.json()["choices"][0]["message"]["content"] == " more"
    await chat(client, messages=[*HELLO, said], continue_final_message=True, **THINKING)
    assert prompt(backend).endswith(f"{ASSISTANT}{THINK}think{END_THINK}Tom has")
    error = error_of(await chat(client, continue_final_message=True), 400)
    assert error["param"] == "continue_final_message"


async def test_calls_that_are_not_forced_are_free(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await chat(client, tools=TOOLS, tool_choice="auto")
    assert backend.requests[-1].sampling.grammar is None


async def test_calls_that_are_forced_are_a_grammar(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await chat(client, tools=TOOLS, tool_choice="required")
    grammar = backend.requests[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert "calculator" in grammar.text
    assert "get_weather" in grammar.text
    assert "(call0 | call1)+" in grammar.text
    named = {"type": "function", "function": {"name": "get_weather"}}
    await chat(client, tools=TOOLS, tool_choice=named, **THINKING)
    grammar = backend.requests[-1].sampling.grammar
    assert grammar is not None
    assert "calculator" not in grammar.text
    assert "reasoning" in grammar.text


def many_tools(n: int, n_parameters: int) -> list[dict[str, Any]]:
    properties = {f"parameter_{i}": {"type": ("string", "number")[i % 2]} for i in range(n_parameters)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return [{"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}} for i in range(n)]


@pytest.mark.parametrize("thinks", [False, True])
async def test_calls_that_make_a_too_long_grammar_are_refused_with_the_limit(
    client: httpx.AsyncClient, backend: FakeBackend, thinks: bool
) -> None:
    """As docs/chat.md says: about so many can be forced, and any number be offered."""
    backend.max_context = 1 << 20
    body = THINKING if thinks else {}
    assert (await chat(client, tools=many_tools(25, 15), tool_choice="required", **body)).status_code == 200
    for n in (28, 40):
        error = error_of(await chat(client, tools=many_tools(n, 15), tool_choice="required", **body), 400)
        assert error["code"] in ("unsupported", "invalid_grammar")
        assert error["param"] == "tool_choice"
        assert str(MAX_GRAMMAR_CHARS) in error["message"]
    assert len(backend.requests) == 1
    assert (await chat(client, tools=many_tools(40, 15), **body)).status_code == 200


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "retrieval"}]}, "tools", "is no function"),
    ({"tools": [{"type": "function"}]}, "tools", "is no function"),
    ({"tools": [function(name="a b")]}, "tools", "the name of a function"),
    ({"tools": [function(description=3)]}, "tools", "description"),
    ({"tools": [function(parameters=[])]}, "tools", "parameters"),
    ({"tools": [function()] * (MAX_TOOLS + 1)}, "tools", str(MAX_TOOLS)),
    ({"tools": [function(description="x" * MAX_TOOL_CHARS)]}, "tools", "too large"),
    ({"tools": [function(parameters={"enum": list(range(20_000))})]}, "tools", "too large"),
    ({"tools": [function(parameters=nested(MAX_TOOL_DEPTH))]}, "tools", "deep"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", "required"),
    ({"tool_choice": function(name="g"), "tools": TOOLS}, "tool_choice", "'g'"),
    ({"tool_choice": "required", "tools": [function(parameters={"anyOf": []})]}, "tool_choice", "anyOf"),
    ({"reasoning_effort": "a lot"}, "reasoning_effort", "none"),
    ({"thinking": {"type": "deep"}}, "thinking", "enabled"),
    ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs", "true or false"),
    ({"chat_template_kwargs": {"reasoning_effort": ["x"]}}, "chat_template_kwargs", "reasoning_effort"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages", "no name"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"type": "x"}]}]}, "messages", "no call"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, backend: FakeBackend, body: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(await chat(client, **body), 400)
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert len(error["message"]) < 1000
    assert backend.requests == []


async def test_what_a_template_cannot_say_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    async with client_of(backend_of(tmp_path, chat_template=template)) as client:
        for name, value in (("tools", TOOLS), ("thinking", {"type": "enabled"}), ("reasoning_effort", "high")):
            error = error_of(await chat(client, **{name: value}), 400)
            assert (error["param"], error["code"]) == (name, "unsupported")
        assert (await chat(client, tools=TOOLS, tool_choice="none", reasoning_effort="none")).status_code == 200


HERMES_TEMPLATE = (
    "{% for t in tools or [] %}<tools>{{ t.function.name }}</tools>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


async def test_a_template_with_tools_has_its_parsers(tmp_path: Path) -> None:
    backend = backend_of(tmp_path, chat_template=HERMES_TEMPLATE)
    backend.max_context, backend.sampling_defaults = 2048, SamplingParams(max_tokens=256)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"a": 3}}\n</tool_call>'
    backend.script.answer = f"hm</think>{call}"
    async with client_of(backend) as client:
        answer = await chat(client, tools=TOOLS, reasoning_effort="high")
        message = answer.json()["choices"][0]["message"]
        assert of_message(answer.json()["choices"][0]) == Answer("hm", "", [("calculator", '{"a": 3}')])
        assert answer.headers[IGNORED_HEADER] == "reasoning_effort"  # it is read for whether to think, not how much
        assert prompt(backend).startswith("<tools>calculator</tools><tools>get_weather</tools>")
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
        answer = await chat(client, messages=[*HELLO, message, result])
        assert answer.headers[IGNORED_HEADER] == "messages.reasoning_content"
        assert prompt(backend).endswith("<tool_call>calculator3<tool>7")
        await chat(client, tools=TOOLS, tool_choice="required")
        grammar = backend.requests[-1].sampling.grammar
        assert grammar is not None
        assert "<tool_call>" in grammar.text


async def test_arguments_may_be_an_object(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": json.loads("1")}}}
    answer = await chat(client, messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert answer.status_code == 200, answer.text
    assert '<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>' in prompt(backend)
