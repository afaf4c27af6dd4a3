from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.bodies import MIN_MAX_VALUES, StructureLimits, check_structure, parse_json
from server.api.errors import InvalidRequest
from tests.api.fakes import FakeBackend
from tests.api.harness import CHAT, COMPLETIONS, complete, error_of, post

TEXT = st.text(st.sampled_from('a\\"[]{},:\n\u2200é🦊'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


LIMITS = StructureLimits(max_values=1000)


def counts(value: Any) -> tuple[int, int, int]:
    """Strings, lists and objects, and depth, of what a body says."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    parts = [counts(v) for v in (value.values() if isinstance(value, dict) else value)]
    n_keys = len(value) if isinstance(value, dict) else 0
    return sum(p[0] for p in parts) + n_keys, 1 + sum(p[1] for p in parts), 1 + max((p[2] for p in parts), default=0)


def refused(body: bytes, **limits: int) -> str:
    try:
        check_structure(body, StructureLimits(**{"max_values": 1 << 20, **limits}))
    except InvalidRequest as error:
        return error.failure.reason
    return ""


@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_counts_are_those_of_the_parsed_body(ascii_only: bool) -> None:
    @given(VALUES)
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(value: Any) -> None:
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
        n_strings, n_containers, depth = counts(value)
        for limit, n, words in (
            ("max_strings", n_strings, "strings"),
            ("max_containers", n_containers, "lists and objects:"),
            ("max_depth", depth, "inside each other"),
        ):
            assert refused(body, **{limit: n}) == ""
            if n:
                assert f"{n} " in refused(body, **{limit: n - 1})
                assert words in refused(body, **{limit: n - 1})
        assert repr(parse_json(body, LIMITS)) == repr(value)

    check()


@given(st.binary(max_size=60) | st.text('"\\[]{},', max_size=60).map(str.encode))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_bytes_are_parsed_as_json_is_or_refused(body: bytes) -> None:
    try:
        value = parse_json(body, LIMITS)
    except InvalidRequest:
        return
    assert repr(value) == repr(json.loads(body))


def test_the_structure_of_other_encodings_is_not_guessed() -> None:
    """In UTF-16 a character may have a byte that looks like a quote, and hide lists from the count."""
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_json('{"\u2200": [1]}'.encode("utf-16"), LIMITS)
    assert parse_json(b"\xef\xbb\xbf[1]", LIMITS) == [1]


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
    client: httpx.AsyncClient, content: bytes
) -> None:
    """The parser would have refused it because it has no end."""
    error = error_of(
        await post(client, CHAT if b"messages" in content else COMPLETIONS, content.removesuffix(b"}")), 400
    )
    assert "The body has" in error["message"]


async def test_a_context_of_many_tokens_may_be_filled_with_ids(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.max_context = MIN_MAX_VALUES + 100_000
    prompt = [5] * (backend.max_context - 10)
    answer = await complete(client, prompt=prompt, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert len(backend.requests[0].prompt_ids) == len(prompt)
