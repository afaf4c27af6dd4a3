"""Documents in the chat format: tokens as the tokenizer makes them, texts as the official encoding writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tiny import chat_format as official
from tiny.conversations import ConversationWriter
from tiny.documents import PRICE_VALUE, WEIGHT_VALUE, Batch, Document
from tiny.json_replies import any_schema, short_value
from tiny.problems import Split
from tiny.sums import Sum, any_sum
from tiny.tokenizer import build_tokenizer
from tiny.tools import calculator, other_tool

TOKENIZER = build_tokenizer()
QUESTION = {"role": "user", "content": "What is 3 + 4 ?"}
CALL = {"a": 3, "op": "+", "b": 4}


def writer(seed: int) -> ConversationWriter:
    return ConversationWriter(TOKENIZER, random.Random(seed))


def text_of(document: Document) -> str:
    text: str = TOKENIZER.decode([token.id for token in document])
    return text


@pytest.mark.parametrize("kind", ["chat", "sum_chat", "talk", "tools", "json_reply", "sum_drill", "few_shot"])
def test_a_document_has_the_tokens_of_its_whole_text(kind: str) -> None:
    """Documents are written piece by piece; a server tokenizes the whole text."""
    written = writer(1)
    for _ in range(20):
        document = written.write(kind, 512)
        assert len(document) <= 512
        assert TOKENIZER.encode(text_of(document), add_special_tokens=False) == [token.id for token in document]


def test_what_the_reasoning_recalled_is_not_recalled_again_by_the_answer() -> None:
    written, n_thoughts = writer(2), 0
    for _ in range(40):
        document = written.chat(512)
        batch = Batch.of([document], 512, 2)
        recalled = (batch.marks == PRICE_VALUE) | (batch.marks == WEIGHT_VALUE)
        assert (batch.sources[recalled] >= 0).all()
        assert int(recalled.sum()) == text_of(document).count("bags of") + text_of(document).count("bars of")
        n_thoughts += text_of(document).count(official.THINK)
    assert n_thoughts > 10


def test_a_tool_is_called_only_where_the_calculator_is_offered() -> None:
    written = writer(3)
    texts = [text_of(written.tools(512)) for _ in range(60)]
    for text in texts:
        offered = '"name": "calculator"' in text
        assert offered or 'invoke name="calculator"' not in text
    assert any('"name": "calculator"' not in text for text in texts)
    assert sum('invoke name="calculator"' in text for text in texts) > 30


def test_the_answer_follows_the_tool_even_where_it_is_wrong() -> None:
    """Else a model could work the sum out itself, and a test would not see whether the result reached it."""
    text = "".join(text_of(writer(seed).tools(512)) for seed in range(30))
    results = [part.partition("</tool_result>") for part in text.split("<tool_result>")[1:]]
    answers = [(said, after.partition("The answer is ")[2].partition(".")[0]) for said, _, after in results]
    final = [(said, answer) for said, answer in answers if answer and "{" not in said]
    assert len(final) > 30
    assert sum(said == answer for said, answer in final) > 0.8 * len(final)  # else: a step between two calls


def test_steps_of_a_sum_lead_to_its_result() -> None:
    assert Sum(47, "+", 38).reasoning == "47 + 30 = 77. 77 + 8 = 85."
    assert Sum(85, "-", 38).reasoning == "85 - 30 = 55. 55 - 8 = 47."
    assert Sum(47, "+", 30).reasoning == "47 + 30 = 77."
    assert Sum(47, "+", 38).worked == "47 + 38 = 77 + 8 = 85"
    assert Sum(3, "+", 4).worked == "3 + 4 = 7"


def test_held_out_sums_are_never_asked_in_training() -> None:
    rng = random.Random(3)
    assert all(Split.owner(any_sum(rng, Split.STREAM).text) is Split.STREAM for _ in range(500))


def test_a_json_reply_has_the_properties_of_its_schema() -> None:
    rng = random.Random(4)
    for _ in range(100):
        schema = any_schema(rng)
        reply = short_value(rng, schema)
        assert set(schema.get("required", ())) <= set(json.loads(json.dumps(reply)))


@pytest.mark.parametrize("n_tools", [1, 2])
@pytest.mark.parametrize("thinks", [False, True])
def test_tools_calls_and_results_are_written_as_the_official_package_writes_them(n_tools: int, thinks: bool) -> None:
    rng = random.Random(5)
    schemas = [dict(each) for each in (calculator(rng), other_tool(rng))][:n_tools]
    for schema in schemas:
        schema.pop("strict", None)  # the package writes such a schema in its own order
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": json.dumps(CALL)}}
    asked = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "1", "content": "7"}
    tools = [{"type": "function", "function": dict(schema)} for schema in schemas]
    prompt = official_prompt([QUESTION, asked, told], tools=tools, thinks=thinks)

    start = f"{official.THINK}why{official.END_THINK}" if thinks else official.END_THINK
    expected = (
        f"{official.BOS}{official.tools_block(schemas)}{official.USER}What is 3 + 4 ?{official.ASSISTANT}{start}"
        f"{official.call_text('calculator', CALL)}{official.EOS}{official.USER}{official.result_text('7')}"
        f"{official.ASSISTANT}{official.THINK if thinks else official.END_THINK}"
    )
    assert prompt.replace(official.EFFORT, "") == expected


def test_a_schema_of_the_reply_is_written_as_the_official_package_writes_it() -> None:
    schema = any_schema(random.Random(6))
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": dict(schema)}}
    prompt = official_prompt([QUESTION], response_format=form, thinks=False)
    assert prompt.startswith(f"{official.BOS}{official.schema_block(schema)}{official.USER}")
    asks_json = {"role": "user", "content": "json"}
    prompt = official_prompt([asks_json], response_format={"type": "json_object"}, thinks=False)
    assert prompt.startswith(f"{official.BOS}{official.JSON_ONLY}{official.USER}")


def test_most_effort_is_asked_for_as_the_official_encoding_does() -> None:
    """The package calls it `high`; its own `max` is of a later model."""
    prompt = official_prompt([QUESTION], reasoning_effort="high", thinks=True)
    turn = f"{official.USER}What is 3 + 4 ?{official.ASSISTANT}{official.THINK}"
    assert prompt == f"{official.BOS}{official.EFFORT}{turn}"


def official_prompt(messages: Sequence[dict[str, Any]], *, thinks: bool, **fields: Any) -> str:
    recipe = pytest.importorskip("deepseek_recipe")
    body = {
        "model": "m",
        "messages": list(messages),
        "thinking": {"type": "enabled" if thinks else "disabled"},
        **fields,
    }
    options = recipe.ConversionOptions().with_model_alias("m", recipe.ModelVersion.DeepseekV4Pro)
    conversation = recipe.ChatCompletionRequest(body).convert(options).conversation
    prompt: str = recipe.DeepseekV4Encoding().render_conversation(conversation).prompt
    return prompt
