"""What the bundled model itself says in a chat, by the ``openai`` client: sums, thoughts, calls and what follows them.

From a pair that drafts, whole and streamed, in chat completions and in responses. How often it is right is measured by
``scripts/train_tiny.py evaluate``; here are a few sums, which it has to know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from cluster import Pair
from evaluation.questions import BUNDLED, load_problems, marked_number
from tiny.conversations import UNKNOWN
from tiny.sums import Sum

from tests.support.examples import CALCULATOR, CALLS, SUMS
from tests.support.processes import process_pair

MODEL = "tiny-dsv4"
N_QUESTIONS = 12
OPTIONS = ("--slots", "8", "--pages", "64", "--poison")
THINKS: dict[str, Any] = {"reasoning_effort": "high"}
FLAT_CALCULATOR = {"type": "function", **CALCULATOR["function"]}
FOX = {
    "type": "function",
    "function": {"name": "find_fox", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}},
}
WRONG_RESULT = "21"
"""A tool's word counts, right or wrong: whoever answers with this has read it."""

each_sum, each_call = (pytest.mark.parametrize("made", which, ids=lambda made: made.text) for which in (SUMS, CALLS))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with process_pair(tmp_path_factory.mktemp("pair"), OPTIONS, (*OPTIONS, "--spec-tokens", "3")) as pair:
        yield pair


@pytest.fixture
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.d.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    pair.wait_all_free()


def asked(made: Sum) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {made.text} ?"}


def arguments(made: Sum) -> dict[str, Any]:
    return {"a": made.a, "op": made.op, "b": made.b}


def say(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    """The whole message, which a stream must repeat."""
    body: Any = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 100, **options}
    [choice] = client.chat.completions.create(**body).choices
    with client.chat.completions.stream(**body) as stream:
        [streamed] = stream.get_final_completion().choices
    said, again = (without_ids(each.message) for each in (choice, streamed))
    assert (again, streamed.finish_reason) == (said, choice.finish_reason)
    assert choice.finish_reason == ("tool_calls" if said["calls"] else "stop")
    return choice.message


def without_ids(message: Any) -> dict[str, Any]:
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return {"content": message.content or "", "reasoning": reasoning_of(message), "calls": calls}


def reasoning_of(message: Any) -> str:
    return getattr(message, "reasoning_content", None) or ""


@each_sum
def test_a_sum_is_worked_out(client: openai.OpenAI, made: Sum) -> None:
    answer = say(client, asked(made))
    assert (answer.content, reasoning_of(answer)) == (made.worked, "")


@each_sum
def test_a_sum_is_thought_out_first(client: openai.OpenAI, made: Sum) -> None:
    answer = say(client, asked(made), **THINKS)
    assert (reasoning_of(answer), answer.content) == (made.reasoning, made.answer)


@each_call
@pytest.mark.parametrize("thinking", [{}, THINKS], ids=["at once", "thinking"])
def test_the_calculator_is_called_and_its_result_taken(
    client: openai.OpenAI, made: Sum, thinking: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"tools": [CALCULATOR], **thinking}
    called = say(client, asked(made), **options)
    assert without_ids(called)["calls"] == [("calculator", arguments(made))]
    assert bool(reasoning_of(called)) is bool(thinking)
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": WRONG_RESULT}
    answer = say(client, asked(made), called.model_dump(exclude_none=True), result, **options)
    assert answer.content == f"The answer is {WRONG_RESULT}."
    assert bool(reasoning_of(answer)) is bool(thinking)


@each_call
def test_a_response_calls_and_takes_the_result(client: openai.OpenAI, made: Sum) -> None:
    body: Any = {"model": MODEL, "tools": [FLAT_CALCULATOR], "temperature": 0}
    conversation: Any = [asked(made)]
    [call] = client.responses.create(input=conversation, **body).output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == arguments(made)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WRONG_RESULT}
    conversation += [call.to_dict(), result]
    answer = client.responses.create(input=conversation, **body)
    assert answer.output_text == f"The answer is {WRONG_RESULT}."


@each_sum
def test_no_other_tool_is_called(client: openai.OpenAI, made: Sum) -> None:
    assert say(client, asked(made), tools=[FOX]).content == made.worked


@pytest.mark.parametrize("thinking", [{}, THINKS], ids=["at once", "thinking"])
def test_questions_are_answered(client: openai.OpenAI, thinking: dict[str, Any]) -> None:
    problems = load_problems(BUNDLED / "test.jsonl")[:N_QUESTIONS]
    answers = [say(client, {"role": "user", "content": each.question}, **thinking) for each in problems]
    right = [marked_number(answer.content) == each.gold for each, answer in zip(problems, answers, strict=True)]
    assert sum(right) >= 0.9 * N_QUESTIONS
    assert all(bool(reasoning_of(answer)) is bool(thinking) for answer in answers)


def test_what_it_does_not_know_it_says(client: openai.OpenAI) -> None:
    answer = say(client, {"role": "user", "content": "Who is the king of France?"})
    assert answer.content == UNKNOWN
