"""Answers are read the same however they are cut into pieces, and nothing that models write makes it fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.parsing import HERMES, Answer, read
from tests.chat.recorded import ANSWERS, SUM, SUM_CALL, WEATHER, WEATHER_CALL, calls

OPEN = {"starts_in_reasoning": True}
CHAT = {"has_ended_reasoning": True}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a}\\"b", "y": [1, {}]}}\n</tool_call>'
CALLED = ("f", '{"x": "a}\\"b", "y": [1, {}]}')


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_recorded_answers(text: str, expected: Answer, size: int) -> None:
    assert read([text[i : i + size] for i in range(0, len(text), size)], **OPEN) == expected


@pytest.mark.parametrize(("text", "whole"), ANSWERS)
@pytest.mark.parametrize("is_cut", [True, False])
def test_an_answer_that_is_cut_anywhere_is_the_beginning_of_the_whole_one(
    text: str, whole: Answer, is_cut: bool
) -> None:
    for end in range(len(text)):
        answer = read(text[:end], is_cut=is_cut, **OPEN)
        said = answer.reasoning + answer.content
        assert "DSML" not in said
        assert "think>" not in said
        assert whole.calls[: len(answer.calls)][:-1] == answer.calls[:-1]
        for (name, arguments), (whole_name, whole_arguments) in zip(answer.calls, whole.calls, strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments)
        if is_cut:
            assert whole.reasoning.startswith(answer.reasoning)
            assert whole.content.startswith(answer.content)


TAGS = [
    *(
        "<think>",
        "</think>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f">',
        "<｜DSML｜invoke ",
    ),
    *("</｜DSML｜invoke>", '<｜DSML｜parameter name="x" string="true">', "<｜DSML｜parameter", "</｜DSML｜parameter>"),
    *(
        '<｜DSML｜parameter name="n" string="false">',
        "\n",
        "\n\n",
        "<",
        ">",
        '"',
        "{",
        "}",
        "1",
        " ",
        "text",
        "｜DSML｜",
    ),
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '"a": ', "\\", "é", "🌋"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=4)), max_size=25).map("".join)
SYNTAXES = st.fixed_dictionaries(
    {
        "tools": st.sampled_from([HERMES, None]),
        "starts_in_reasoning": st.booleans(),
        "has_ended_reasoning": st.booleans(),
        "whole_reasoning": st.booleans(),
        "hides_reasoning": st.booleans(),
        "max_calls": st.sampled_from([None, 1]),
    }
)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), text=TEXTS, is_cut=st.booleans(), is_dsml=st.booleans(), syntax=SYNTAXES)
def test_any_text_in_any_pieces(data: st.DataObject, text: str, is_cut: bool, is_dsml: bool, syntax: Any) -> None:
    if is_dsml:
        syntax.pop("tools")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read([text], is_cut=is_cut, **syntax)
    assert read(pieces, is_cut=is_cut, **syntax) == whole
    assert read(text, is_cut=is_cut, **syntax) == whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x <｜DSML｜foo> y", Answer("", "x <｜DSML｜foo> y")),
        ("use <｜DSML｜tool_calls> for it", Answer("", "use <｜DSML｜tool_calls> for it")),
        (calls(SUM).replace('name="calculator"', "name=calculator"), None),
        (calls(SUM).replace('name="a" string', 'nome="a" string'), None),
        (calls(), None),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(text: str, expected: Answer | None) -> None:
    assert read(text, **CHAT) == (expected or Answer("", text))


def test_broken_calls_behind_a_good_one_are_content() -> None:
    text = calls(SUM, "<｜DSML｜invoke name=broken>\n")
    answer = read(text, **CHAT)
    assert answer.calls == [SUM_CALL]
    assert answer.content.startswith("\n<｜DSML｜invoke name=broken>")


def test_a_call_that_breaks_has_whole_arguments_all_the_same() -> None:
    answer = read(calls(SUM).replace('parameter name="b"', "parameter nome"), **CHAT)
    [(name, arguments)] = answer.calls
    assert (name, json.loads(arguments)) == ("calculator", {"a": 3, "op": "+"})
    assert "｜DSML｜parameter nome" in answer.content


@pytest.mark.parametrize("value", ["[1, 2", "NaN", "{'a': 1}", "1}", "9" * 5000, "[" * 5000])
def test_a_value_that_is_no_json_is_a_text(value: str) -> None:
    [(_, arguments)] = read([calls(SUM).replace(">3<", f">{value}<")], **CHAT).calls
    assert json.loads(arguments)["a"] == value


@pytest.mark.parametrize(
    "missing", ["<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", "</｜DSML｜invoke>\n", "\n", ' string="true"']
)
def test_parts_that_may_be_missing(missing: str) -> None:
    assert read(calls(WEATHER).replace(missing, ""), **CHAT).calls == [WEATHER_CALL]


def test_an_answer_may_begin_its_reasoning_itself() -> None:
    assert read("\n<think>a</think>b") == Answer("a", "b")
    assert read("<think>a</think>b", **OPEN) == Answer("a", "b")
    assert read("<think>a</think>b", **CHAT) == Answer("", "<think>a</think>b")


def test_a_call_ends_the_reasoning() -> None:
    assert read(f"a{calls(SUM)} b</think>", **OPEN) == Answer("a", "b</think>", [SUM_CALL])


def test_reasoning_that_is_not_separated_is_content_and_calls_are_found_in_it() -> None:
    assert read(f"a</think>b{calls(SUM)}", reasoning=None, **OPEN) == Answer("", "a</think>b", [SUM_CALL])


def test_without_tools_dsml_is_content() -> None:
    assert read(f"a</think>b{calls(SUM)}", tools=None, **OPEN) == Answer("a", f"b{calls(SUM)}")


def test_hidden_reasoning_and_calls_beyond_the_first() -> None:
    assert read(f"a</think>b{calls(SUM, WEATHER)}", hides_reasoning=True, max_calls=1, **OPEN) == Answer(
        "", "b", [SUM_CALL]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"hi\n{CALL}\n{CALL}", Answer("", "hi", [CALLED, CALLED])),
        ('<tool_call>{"arguments": {"q": 1}, "name": "g"}</tool_call>', Answer("", "", [("g", '{"q": 1}')])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', Answer("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f"}', Answer("", "", [("f", "{}")])),
        ("<tool_call> foo </tool_call>", Answer("", "<tool_call> foo </tool_call>")),
        ('<tool_call>{"name": 3}</tool_call>', Answer("", '<tool_call>{"name": 3}</tool_call>')),
        (CALL[:30], Answer()),
        (CALL[:50], Answer("", "", [("f", CALLED[1][: len(CALL[:50]) - CALL.index(CALLED[1])])])),
    ],
)
def test_hermes(text: str, expected: Answer) -> None:
    assert read(text, tools=HERMES, **CHAT) == expected
