"""``/v1/responses`` through the ``openai`` client's typed methods, over a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseInputParam

from server.failure import Failure, RequestFailed
from tests.api.fakes import FakeBackend
from tests.api.harness import until
from tests.api.test_openai_tools import Calculator, Result
from tests.chat.recorded import ANSWERS, SUM, SUM_CALL, WEATHER, WEATHER_CALL, calls

QUESTION = "What is 3 + 4?"
THINKING: Any = {"effort": "low"}


@pytest.fixture
def backend(deepseek: FakeBackend) -> FakeBackend:
    return deepseek


@pytest.fixture
def client(server_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server_url}/v1", api_key="unused", max_retries=0)


def tool() -> Any:
    function = openai.pydantic_function_tool(Calculator, name="calculator")["function"]
    return {"type": "function", **function}


def plain(response: Response) -> Any:
    """What a response says, without what is drawn or measured anew each time."""
    said: Any = response.model_dump(exclude={"id", "created_at", "completed_at", "usage"})
    said.pop("pd")
    for item in said["output"]:
        del item["id"]
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return said


def calls_of(response: Response) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if isinstance(item, ResponseFunctionToolCall)]


def reasoning_of(response: Response) -> str:
    return "".join(
        part.text for item in response.output if item.type == "reasoning" for part in item.content or () if part.text
    )


def test_a_whole_response(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = "I add.</think>It is 7."
    response = client.responses.create(
        model="tiny",
        instructions="Be short.",
        input=QUESTION,
        reasoning=THINKING,
        temperature=0.5,
        max_output_tokens=50,
        metadata={"a": "b"},
    )
    assert response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (reasoning_of(response), response.output_text) == ("I add.", "It is 7.")
    assert (response.instructions, response.metadata, response.temperature) == ("Be short.", {"a": "b"}, 0.5)
    assert response.max_output_tokens == 50
    assert response.completed_at is not None
    [request] = backend.requests
    assert (request.sampling.max_tokens, request.sampling.temperature) == (50, 0.5)
    assert response.usage is not None
    n_all, n_reasoning = (len(backend.tokenizer.encode(text)) for text in (backend.script.answer, "I add."))
    assert response.usage.input_tokens == len(request.prompt_ids)
    assert response.usage.output_tokens == n_all  # the end instead of the beginning
    assert response.usage.output_tokens_details.reasoning_tokens == n_reasoning - 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.model_extra or {})["pd"]["prefill"] == "10.0.0.1:8998"
    assert (response.model_extra or {})["store"] is False


def test_a_streamed_response_is_the_whole_one(client: openai.OpenAI, backend: FakeBackend) -> None:
    texts = [(text, expected.reasoning, expected.content, expected.calls) for text, expected in ANSWERS]
    texts += [("a</think>Tom has 42 äpfel 🦊", "a", "Tom has 42 äpfel 🦊", []), ("", "", "", [])]
    for n_tokens in (1, 7):
        backend.script.tokens_a_step = n_tokens
        for text, reasoning, content, called in texts:
            backend.script.answer = text
            body: Any = {"model": "tiny", "input": QUESTION, "tools": [tool()], "reasoning": THINKING}
            whole = client.responses.create(**body)
            with client.responses.stream(**body) as stream:
                events = list(stream)
                final = stream.get_final_response()
            assert plain(final) == plain(whole)
            assert final.usage == whole.usage
            assert (reasoning_of(whole), whole.output_text, calls_of(whole)) == (reasoning, content, called)
            check_events(events, final)


def check_events(events: list[Any], final: Response) -> None:
    """The events tell of every item, in order, and their pieces are its text."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    texts = {
        "reasoning": ("response.reasoning_text", "text"),
        "message": ("response.output_text", "text"),
        "function_call": ("response.function_call_arguments", "arguments"),
    }
    own = [[e for e in events if getattr(e, "output_index", None) == index] for index in range(len(final.output))]
    assert [event for item in own for event in item] == events[2:-1]
    for item, told in zip(final.output, own, strict=True):
        prefix, name = texts[item.type]
        kinds = [event.type for event in told]
        part = item.type != "function_call"
        assert kinds[0] == "response.output_item.added"
        assert (kinds[1] == "response.content_part.added") == part
        last = [f"{prefix}.done", *(["response.content_part.done"] if part else []), "response.output_item.done"]
        assert kinds[-len(last) :] == last
        assert set(kinds[2 if part else 1 : -len(last)]) <= {f"{prefix}.delta"}
        text = "".join(event.delta for event in told if event.type == f"{prefix}.delta")
        done = next(event for event in told if event.type == f"{prefix}.done")
        assert getattr(done, name) == text
        item_id = item.id
        assert {event.item_id for event in told if hasattr(event, "item_id")} <= {item_id}
        assert told[-1].item.id == item_id


def test_a_loop_of_calls_has_the_prompts_of_chat_completions(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = "I add.</think>Let me see." + calls(SUM, WEATHER)
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    body: Any = {"model": "tiny", "tools": [tool()], "reasoning": THINKING}
    response = client.responses.parse(input=conversation, **body)
    called = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in called] == [SUM_CALL, WEATHER_CALL]
    assert called[0].parsed_arguments == {"a": 3, "op": "+", "b": 4}
    conversation += [item.model_dump(exclude_none=True) for item in response.output]
    for call in called:
        conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "7"})
    backend.script.answer = "So.</think>It is 7."
    response = client.responses.parse(input=conversation, **body)
    assert response.output_text == "It is 7."
    conversation += [item.model_dump(exclude_none=True) for item in response.output]
    conversation.append({"role": "user", "content": [{"type": "input_text", "text": "And more?"}] * 2})
    client.responses.create(input=conversation, instructions="Be short.", **body)

    tools: Any = [openai.pydantic_function_tool(Calculator, name="calculator")]
    spelled = [(call.call_id, call.name, call.arguments) for call in called]
    messages: list[Any] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I add.",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, name, arguments in spelled
            ],
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": "7"} for call in called),
        {"role": "assistant", "content": "It is 7.", "reasoning_content": "So."},
        {"role": "user", "content": [{"type": "text", "text": "And more?"}] * 2},
    ]
    for part in (messages[1:2], messages[1:5], messages):
        client.chat.completions.create(model="tiny", messages=part, tools=tools, reasoning_effort="low")
    ids = [request.prompt_ids for request in backend.requests]
    assert ids[:3] == ids[3:]
    assert "So.</think>It is 7." in backend.tokenizer.decode(ids[2])


def test_a_call_that_is_forced_and_only_one(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = calls(SUM, SUM)
    choice: Any = {"type": "function", "name": "calculator"}
    response = client.responses.create(
        model="tiny", input=QUESTION, tools=[tool()], tool_choice=choice, parallel_tool_calls=False
    )
    assert calls_of(response) == [SUM_CALL]
    assert response.model_dump()["tool_choice"] == choice
    assert response.parallel_tool_calls is False
    assert response.tools[0].type == "function"
    [request] = backend.requests
    assert request.sampling.grammar is not None


def test_an_answer_as_an_object(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = 'I add.</think>{"value": 7}'
    response = client.responses.parse(model="tiny", input=QUESTION, text_format=Result, reasoning=THINKING)
    assert response.output_parsed == Result(value=7)
    with client.responses.stream(model="tiny", input=QUESTION, text_format=Result, reasoning=THINKING) as stream:
        assert stream.until_done().get_final_response().output_parsed == Result(value=7)
    client.responses.create(model="tiny", input=QUESTION, text={"format": {"type": "json_object"}})
    for request in backend.requests:
        assert request.sampling.grammar is not None
    assert "## Response Format:" in backend.tokenizer.decode(backend.requests[0].prompt_ids)


@pytest.mark.parametrize("n_tokens", [1, 3, 12, 40])
def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI, backend: FakeBackend, n_tokens: int) -> None:
    backend.script.answer = "I add these numbers.</think>So:" + calls(SUM)
    body: Any = {"model": "tiny", "input": QUESTION, "tools": [tool()], "reasoning": THINKING}
    body["max_output_tokens"] = n_tokens
    whole = client.responses.create(**body)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    statuses = [item.model_dump()["status"] for item in whole.output]
    assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete"]
    assert whole.usage is not None
    assert whole.usage.output_tokens == n_tokens
    events = list(client.responses.create(**body, stream=True))
    assert events[-1].type == "response.incomplete"
    assert plain(events[-1].response) == plain(whole)


def test_a_failure_in_a_stream_is_a_failed_response(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.answer = "I add.</think>It is 7, as far as I know."
    backend.script.fail_after = 12
    body: Any = {"model": "tiny", "input": QUESTION, "reasoning": THINKING}
    events: list[Any] = list(client.responses.create(**body, stream=True))
    assert events[0].type == "response.created"
    failed = events[-1]
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.code == "server_error"
    assert "the room failed" in failed.response.error.message
    assert failed.response.error.failure == "engine_error"
    assert reasoning_of(failed.response) == "I add."
    with pytest.raises(openai.InternalServerError, match="the room failed"):
        client.responses.create(**body)


def test_a_failure_before_the_head_is_a_status(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.script.refuse = RequestFailed(Failure("overloaded", "full"))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.responses.create(model="tiny", input=QUESTION, stream=stream)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts(client: openai.OpenAI, backend: FakeBackend, stream: bool) -> None:
    backend.script.hang_after = 4
    if stream:
        with client.responses.create(model="tiny", input=QUESTION, stream=True) as events:
            next(iter(events))
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1.0).responses.create(model="tiny", input=QUESTION)
    until(lambda: backend.generations and all(generation.aborted for generation in backend.generations))


def test_input_of_all_kinds(client: openai.OpenAI, backend: FakeBackend) -> None:
    items: ResponseInputParam = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "?"}]},
        {"type": "function_call", "call_id": "c1", "name": "calculator", "arguments": json.dumps({"a": 3})},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
        {"role": "assistant", "content": "It is 7."},
        {"role": "user", "content": "Thanks."},
    ]
    client.responses.create(model="tiny", input=items, tools=[tool()])
    prompt = backend.tokenizer.decode(backend.requests[0].prompt_ids)
    for text in ("Be short.", QUESTION, 'name="calculator"', "It is 7.", "Thanks."):
        assert text in prompt
