"""What an answer must look like: each way to say it becomes one grammar, which is compiled before anything runs."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from server.engine.grammar import Grammar
from tests.api.fakes import FakeBackend
from tests.api.harness import WITHIN_S, chat, client_of, complete, error_of

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}, "required": ["ä"]}
TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))
AS_SCHEMA = Grammar("json_schema", TEXT)
WAYS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, AS_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": TEXT, "disable_fallback": False}}, AS_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", 'b"']}}, Grammar("lark", 'start: "a" | "b\\""')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_json": {}}, Grammar("json_schema", "{}")),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a"]}, Grammar("lark", 'start: "a"')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"json_schema": TEXT}, AS_SCHEMA),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"regex": "a+", "response_format": {"type": "text"}}, Grammar("regex", "a+")),
]


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize(("body", "grammar"), WAYS, ids=lambda value: str(value)[:60])
async def test_each_way_to_say_it_becomes_a_grammar(
    client: httpx.AsyncClient, backend: FakeBackend, ask: Any, body: dict[str, Any], grammar: Grammar | None
) -> None:
    """The answer of the fake backend does not follow it: only what is asked for is looked at."""
    answer = await ask(client, **body)
    assert answer.status_code == 200, answer.text
    assert backend.requests[0].sampling.grammar == grammar
    assert grammar is None or backend.tokenizer.grammars.guide(grammar) is not None


async def test_gbnf_is_taken_too(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await complete(client, ebnf='root ::= "a" | "b"')).status_code == 200
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "lark"


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"response_format": {"type": "xml"}}, "unsupported", "json_schema"),
        ({"response_format": {}}, "unsupported", "type"),
        ({"response_format": "json"}, "invalid_value", "dictionary"),
        ({"response_format": {"type": "json_schema"}}, "invalid_value", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "invalid_grammar", "object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "invalid_grammar",
            "not",
        ),
        ({"guided_json": "{"}, "invalid_grammar", "not JSON"),
        ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 1}}, "invalid_grammar", "minLength"),
        ({"guided_json": {"enum": ["x" * 70000]}}, "invalid_grammar", "at most"),
        ({"regex": "(a"}, "invalid_grammar", "unclosed"),
        ({"guided_choice": []}, "invalid_value", "at least 1"),
        ({"guided_choice": ["a"] * 1025}, "invalid_value", "at most 1024"),
        ({"ebnf": "root ::= ("}, "invalid_grammar", "GBNF"),
        ({"structured_outputs": {}}, "invalid_value", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "invalid_value", "exactly one"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "unsupported", "whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "unsupported", "structural_tag"),
        ({"structured_outputs": {"choice": [1]}}, "invalid_grammar", "list of strings"),
        ({"structured_outputs": {"regex": 1}}, "invalid_grammar", "string"),
        ({"regex": "a", "guided_json": {}}, "invalid_value", "leave all but one out"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_is_wrong_is_said(
    client: httpx.AsyncClient, backend: FakeBackend, body: dict[str, Any], code: str, says: str
) -> None:
    error = error_of(await complete(client, **body), 400)
    assert error["code"] == code
    assert any(error["param"].startswith(name) for name in body)
    assert says in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize("field", ["regex", "guided_json", "guided_choice"])
async def test_a_grammar_that_is_too_long_costs_nothing_behind_reasoning_either(
    deepseek: FakeBackend, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """What puts it behind the reasoning goes through it character by character, in the interpreter."""
    monkeypatch.setattr("server.api.rules.behind_reasoning", lambda *_: pytest.fail("it was gone through"))
    text = "(a/b)" * 20000
    value = {"regex": text, "guided_json": {"enum": [text]}, "guided_choice": [text]}[field]
    async with client_of(deepseek) as client:
        error = error_of(await chat(client, thinking={"type": "enabled"}, **{field: value}), 400)
    assert (error["code"], error["param"]) == ("invalid_grammar", field)
    assert "at most 65536" in error["message"]
    assert deepseek.requests == []


async def test_grammars_are_compiled_outside_of_the_event_loop(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    monkeypatch.setattr(
        backend.tokenizer.grammars, "compile", lambda grammar: threads.append(threading.current_thread().name)
    )
    await complete(client, regex="new+")
    [thread] = threads
    assert thread.startswith("compile grammar")


async def test_a_grammar_that_is_compiled_waits_for_no_other(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = backend.tokenizer.grammars
    assert (await complete(client, regex="known+")).status_code == 200
    may_end, compiled = threading.Event(), grammars.compile

    def slow(grammar: Grammar) -> None:
        assert may_end.wait(WITHIN_S)
        compiled(grammar)

    monkeypatch.setattr(grammars, "compile", slow)
    other = asyncio.create_task(complete(client, regex="slow+"))
    for _ in range(3):
        assert (await complete(client, regex="known+")).status_code == 200
    assert not other.done()
    may_end.set()
    assert (await other).status_code == 200
