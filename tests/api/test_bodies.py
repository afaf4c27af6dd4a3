from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api import bodies
from server.api.bodies import check_structure, parse_json
from server.api.errors import InvalidRequest
from tests.api.fakes import FakeBackend
from tests.api.test_chat import CHAT
from tests.api.test_errors import JSON, error_of

TEXT = st.text(st.sampled_from('a\\"[]{},:\n\u2200é🦊'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Strings, lists and objects, and depth, of what a body says."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    parts = [counts(v) for v in (value.values() if isinstance(value, dict) else value)]
    n_keys = len(value) if isinstance(value, dict) else 0
    return sum(p[0] for p in parts) + n_keys, 1 + sum(p[1] for p in parts), 1 + max((p[2] for p in parts), default=0)


def refused(body: bytes, max_values: int = 1 << 20) -> str:
    try:
        check_structure(body, max_values)
    except InvalidRequest as error:
        return error.failure.reason
    return ""


@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_counts_are_those_of_the_parsed_body(monkeypatch: pytest.MonkeyPatch, ascii_only: bool) -> None:
    @given(VALUES)
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(value: Any) -> None:
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
        n_strings, n_containers, depth = counts(value)
        for limit, n, words in (
            ("MAX_STRINGS", n_strings, "strings"),
            ("MAX_CONTAINERS", n_containers, "lists and objects:"),
            ("MAX_DEPTH", depth, "inside each other"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(bodies, limit, n)
                assert refused(body) == ""
                if n:
                    patch.setattr(bodies, limit, n - 1)
                    assert f"{n} " in refused(body)
                    assert words in refused(body)
        assert repr(parse_json(body, 1000)) == repr(value)

    check()


@given(st.binary(max_size=60) | st.text('"\\[]{},', max_size=60).map(str.encode))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_bytes_are_parsed_as_json_is_or_refused(body: bytes) -> None:
    try:
        value = parse_json(body, 1000)
    except InvalidRequest:
        return
    assert repr(value) == repr(json.loads(body))


def test_the_structure_of_other_encodings_is_not_guessed() -> None:
    """In UTF-16 a character may have a byte that looks like a quote, and hide lists from the count."""
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_json('{"\u2200": [1]}'.encode("utf-16"), 1000)
    assert parse_json(b"\xef\xbb\xbf[1]", 1000) == [1]


TOO_MUCH = {
    "prompts": b'{"prompt": [' + b'"a",' * 100_000 + b'"a"]}',
    "one-id prompts": b'{"prompt": [' + b"[5]," * 100_000 + b"[5]]}",
    "ids": b'{"prompt": [' + b"5," * 1_000_000 + b"5]}",
    "stop": b'{"prompt": "x", "stop": [' + b'"a",' * 100_000 + b'"a"]}',
    "rooms": b'{"prompt": "x", "bootstrap_room": [' + b"5," * 1_000_000 + b"5]}",
    "an unknown field": b'{"prompt": "x", "z": [' + b"{}," * 100_000 + b"{}]}",
    "900 lists": b'{"prompt": "x", "z": ' + b"[" * 900 + b"]" * 900 + b"}",
    "messages": b'{"messages": [' + b'{"role":"user","content":"x"},' * 50_000 + b"5]}",
    "a nested field of a message": b'{"messages": [{"role":"user","content":"x","z":'
    + b"[" * 900
    + b"]" * 900
    + b"}]}",
}


@pytest.mark.parametrize("content", TOO_MUCH.values(), ids=TOO_MUCH)
async def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(
    backend: FakeBackend, registry: Any, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    from server.api import create_app

    app: FastAPI = create_app(backend, registry)
    monkeypatch.setattr(json, "loads", None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.post(CHAT if b"messages" in content else "/v1/completions", content=content, headers=JSON)
    monkeypatch.undo()
    assert "The body has" in error_of(answer, 400)["message"]


async def test_a_context_of_many_tokens_may_be_filled_with_ids(backend: FakeBackend, registry: Any) -> None:
    from server.api import create_app

    backend.max_context = bodies.MIN_MAX_VALUES + 100_000
    app = create_app(backend, registry)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
        prompt = [5] * (backend.max_context - 10)
        answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert len(backend.requests[0].prompt_ids) == len(prompt)
