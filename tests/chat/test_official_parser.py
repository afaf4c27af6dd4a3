"""What is well-formed is read as the package of DeepSeek reads it."""

from __future__ import annotations

import json

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.parsing import Answer, read
from tests.chat.recorded import ANSWERS, calls, invoke, parameter


def official(text: str) -> Answer:
    """What the package makes of an answer in thinking mode."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    options = recipe.ConversionOptions().with_model_alias("m", recipe.ModelVersion.DeepseekV4Pro)
    request = recipe.ChatCompletionRequest(body).convert(options)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "m")
    processor = recipe.StreamProcessor(generator, request.parsing_options)
    chunks = [*processor.push(recipe.InferenceChunk.ready()), *processor.push(recipe.InferenceChunk.text(text, 1))]
    answer = Answer()
    for chunk in [*chunks, *processor.finish()]:
        assert isinstance(chunk, recipe.ChatCompletionChunk)
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            answer.reasoning += delta.get("reasoning_content") or ""
            answer.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if "name" in call["function"]:
                    answer.calls.append((call["function"]["name"], ""))
                name, arguments = answer.calls[call["index"]]
                answer.calls[call["index"]] = (name, arguments + call["function"].get("arguments", ""))
    return answer


def same(ours: Answer, theirs: Answer) -> bool:
    """The package leaves out newlines at the edges of reasoning and content."""
    ours_calls = [(name, json.loads(arguments)) for name, arguments in ours.calls]
    theirs_calls = [(name, json.loads(arguments)) for name, arguments in theirs.calls]
    texts = (ours.reasoning.strip(), ours.content.strip()) == (theirs.reasoning.strip(), theirs.content.strip())
    return texts and ours_calls == theirs_calls


@pytest.mark.parametrize("text", [text for text, _ in ANSWERS])
def test_recorded_answers(text: str) -> None:
    assert same(read([text], starts_in_reasoning=True), official(text))


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>｜"), max_size=20)
NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
PARAMETERS = st.dictionaries(NAMES, JSON_VALUES, max_size=4)


def written(arguments: dict[str, object]) -> list[str]:
    return [
        parameter(name, value) if isinstance(value, str) else parameter(name, json.dumps(value), is_text=False)
        for name, value in arguments.items()
    ]


@settings(deadline=None, max_examples=200)
@given(WORDS, WORDS, st.lists(st.tuples(NAMES, PARAMETERS), min_size=1, max_size=3))
def test_any_calls(reasoning: str, content: str, made: list[tuple[str, dict[str, object]]]) -> None:
    text = f"{reasoning}</think>{content}{calls(*(invoke(name, *written(arguments)) for name, arguments in made))}"
    answer = read([text], starts_in_reasoning=True)
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == made
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert same(answer, official(text))
