"""Keeps answers short, so that the time of a run is spent on requests: schemathesis loads this file."""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS, MAX_N = 4, 2


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


def _is_between(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low < value <= high
