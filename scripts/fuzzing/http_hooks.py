"""What schemathesis must know about this server: short answers, and which errors of a server are none of its own."""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS, MAX_N = 4, 2
NAMED_PEER = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
"""A request may name the prefill node; one that names a node that is not there gets 502, 503 or 504."""


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Lowers values that are valid and large; what is wrong stays wrong."""
    if not isinstance(body, dict):
        return body
    short = dict(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if _is_between(short.get(name), MAX_TOKENS, 1 << 20):
            short[name] = MAX_TOKENS
    if short.get("max_completion_tokens") is None:
        short.setdefault("max_tokens", MAX_TOKENS)
    if _is_between(short.get("n"), MAX_N, 128):
        short["n"] = MAX_N
    return short


@schemathesis.check
def server_error_is_of_a_named_peer(_context: Any, response: Any, case: Any) -> None:
    """Any other error of 500 and more is a fault of the server; all are in OpenAI's shape."""
    if response.status_code < 500:
        return
    names_peer = isinstance(case.body, dict) and any(case.body.get(name) is not None for name in NAMED_PEER)
    is_known = response.status_code in (502, 503, 504) and bool(response.json()["error"]["code"])
    if not (names_peer and is_known):
        raise AssertionError(f"{response.status_code} {response.text[:300]}")


def _is_between(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low < value <= high
