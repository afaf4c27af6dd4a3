"""How chunks are spelled: in fast JSON where it is the same as the standard library's, else in that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.api.chunks import event, exact_json, to_json
from server.engine.request import FinishReason


def spelled(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "code_points", [range(0x20), range(0x20, 0x80), range(0x80, 0xD800, 7), range(0xE000, 0x11000)]
)
def test_every_character_is_spelled_as_the_standard_library_does(code_points: range) -> None:
    for code_point in code_points:
        value = {"text": f"a{chr(code_point)}b"}
        assert to_json(value) == exact_json(value) == spelled(value)
        assert to_json(value).isascii()


@pytest.mark.parametrize(
    "value",
    [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": FinishReason.STOP, "stop_reason": "\u2028"},
        {"delta": {}, "finish_reason": FinishReason.LENGTH, "stop_reason": 1},
        [{"usage": {"prompt_tokens": 2**40}, "flags": [True, False]}, "\U0001f98a"],
    ],
)
def test_what_chunks_are_made_of(value: Any) -> None:
    assert to_json(value) == exact_json(value) == spelled(value)


@pytest.mark.parametrize("number", [1e-05, 1e-07, 1e16, -0.5, -9999.0, 5e-324, 0.1])
def test_floats_of_an_event_are_spelled_as_the_standard_library_does(number: float) -> None:
    assert event({"logprob": number}) == b"data: " + spelled({"logprob": number}) + b"\n\n"
