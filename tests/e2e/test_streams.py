"""A stream, put together, is the whole answer, on a pair with drafts and on all three routes: with characters of
several bytes, stop strings, grammars, calls and thinking.

At this temperature the bundled model writes nonsense with broken characters in it. Grammars add whole ones.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from cluster import Pair

from tests.api.deepseek import CALCULATOR
from tests.api.harness import CHAT, COMPLETIONS, RESPONSES
from tests.support.processes import process_pair

OPTIONS = ("--slots", "8", "--pages", "64", "--poison")
QUICK, FULL = 2, 10
"""Prompts of each kind; with all of them there are 100."""
WIDE = "🦊👩🚀äōß日"
WORDS = ("Tom", "3", "äpfel", "🦊", "日本", "+", "Ōsaka", "naïve", "👩‍🚀", "bags", "\n", "How many")
REGEX = f"[a-c {WIDE}]{{30,60}}"
CITY = {"enum": ["Zürich", "Ōsaka 🦊", "東京", "ü", "é", "🦊"]}
NOTE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    },
}
FLAT_NOTE = {"type": "function", **NOTE["function"]}
NAMED = {"type": "function", "function": {"name": "note"}}
SCORED = {"logprobs": True, "top_logprobs": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"logprobs": 2, "echo": True}),
    "completion, stops": (COMPLETIONS, {"logprobs": 0, "stop": ["e", " 1", "�"], "max_tokens": 60}),
    "completion, wide": (COMPLETIONS, {"logprobs": 1, "regex": REGEX, "stop": ["🦊ä", "aß", "日"], "max_tokens": 99}),
    "chat": (CHAT, SCORED),
    "chat, thinking, stops": (CHAT, {**SCORED, "reasoning_effort": "low", "stop": ["ee", " 12", "at"]}),
    "chat, thinking, wide": (CHAT, {**SCORED, "reasoning_effort": "low", "regex": REGEX, "max_tokens": 99}),
    "a call": (CHAT, {**SCORED, "tools": [NOTE], "tool_choice": NAMED, "max_tokens": 240}),
    "a named call, thinking": (
        CHAT,
        {"tools": [CALCULATOR, NOTE], "tool_choice": NAMED, "reasoning_effort": "high", "max_tokens": 240},
    ),
    "response, thinking": (RESPONSES, {"reasoning": {"effort": "low"}}),
    "response, calls": (RESPONSES, {"tools": [FLAT_NOTE], "tool_choice": "required", "max_output_tokens": 240}),
}
Told = dict[str, Any]
"""What an answer says, in one shape for every route."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with process_pair(tmp_path_factory.mktemp("pair"), OPTIONS, (*OPTIONS, "--spec-tokens", "2")) as pair:
        yield pair


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=pair.d.url, timeout=60) as client:
        yield client
    await asyncio.to_thread(pair.wait_all_free)


def requests_of(kind: str, n: int) -> list[dict[str, Any]]:
    route, fields = KINDS[kind]
    found = []
    for seed in range(n):
        words = " ".join(random.Random(f"{kind} {seed}").choices(WORDS, k=12))
        asked: dict[str, Any] = {
            COMPLETIONS: {"prompt": words, "max_tokens": 30},
            CHAT: {"messages": [{"role": "user", "content": words}], "max_tokens": 40},
            RESPONSES: {"input": words, "max_output_tokens": 40},
        }[route]
        found.append({"temperature": 1.5, "seed": seed, **asked, **fields})
    return found


async def both(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> tuple[Told, Told]:
    """The whole answer, and the stream put together."""
    usage = {} if route == RESPONSES else {"stream_options": {"include_usage": True}}
    whole, streamed = await asyncio.gather(
        client.post(route, json=body), client.post(route, json={**body, **usage, "stream": True})
    )
    assert whole.status_code == 200, whole.text
    assert streamed.status_code == 200, streamed.text
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line.startswith("data: ")]
    if route == RESPONSES:
        return response(whole.json()), joined_response([json.loads(line) for line in lines])
    assert lines.pop() == "[DONE]"
    return choice(whole.json()), joined_choice([json.loads(line) for line in lines])


def choice(answer: dict[str, Any]) -> Told:
    [found] = answer["choices"]
    message = found.get("message", {})
    return {
        "text": found.get("text") or message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [call["function"] for call in message.get("tool_calls") or ()],
        "end": (found["finish_reason"], found.get("stop_reason")),
        "logprobs": found["logprobs"] or {},
        "usage": answer["usage"],
    }


def joined_choice(chunks: list[dict[str, Any]]) -> Told:
    told: Told = {"text": "", "reasoning": "", "calls": [], "end": (None, None), "logprobs": {}, "usage": None}
    for chunk in chunks:
        told["usage"] = chunk.get("usage") or told["usage"]
        for part in chunk["choices"]:
            assert told["end"] == (None, None), "nothing comes behind the end"
            delta = part.get("delta", {})
            told["text"] += part.get("text") or delta.get("content") or ""
            told["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(told["calls"]):
                    told["calls"].append({"name": call["function"]["name"], "arguments": ""})
                told["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            for name, values in (part["logprobs"] or {}).items():
                before = told["logprobs"].get(name)
                told["logprobs"][name] = values if before is None else before + values
            told["end"] = (part["finish_reason"], part.get("stop_reason"))
    return told


def response(answer: dict[str, Any]) -> Told:
    told: Told = {"text": "", "reasoning": "", "calls": []}
    for item in answer["output"]:
        if item["type"] == "function_call":
            told["calls"].append({"name": item["name"], "arguments": item["arguments"]})
        else:
            name = "reasoning" if item["type"] == "reasoning" else "text"
            told[name] += "".join(part["text"] for part in item["content"])
    return {**told, "end": (answer["status"], answer["incomplete_details"]), "usage": answer["usage"]}


def joined_response(events: list[dict[str, Any]]) -> Told:
    """By its small events; what the last one says as a whole is the same."""
    told: Told = {"text": "", "reasoning": "", "calls": []}
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                told["text"] += event["delta"]
            case "response.reasoning_text.delta":
                told["reasoning"] += event["delta"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                told["calls"].append({"name": event["item"]["name"], "arguments": ""})
            case "response.function_call_arguments.delta":
                told["calls"][-1]["arguments"] += event["delta"]
    last = response(events[-1]["response"])
    told |= {"end": last["end"], "usage": last["usage"]}
    assert told == last
    return told


def told_alike(told: Told) -> Told:
    """Without what was found in the cache: that depends on which of two equal requests came first."""
    details = ("prompt_tokens_details", "input_tokens_details")
    return {**told, "usage": {name: value for name, value in told["usage"].items() if name not in details}}


async def check(client: httpx.AsyncClient, kind: str, n: int) -> list[Told]:
    """Compares ``n`` answers, and gives them."""
    route, fields = KINDS[kind]
    answers = await asyncio.gather(*(both(client, route, body) for body in requests_of(kind, n)))
    for whole, streamed in answers:
        assert told_alike(streamed) == told_alike(whole)
        assert whole["logprobs"] if "logprobs" in fields else not whole.get("logprobs")
    return [whole for whole, _ in answers]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_is_the_whole_answer(client: httpx.AsyncClient, kind: str) -> None:
    await check(client, kind, QUICK)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_hundred_streams_are_the_whole_answers(client: httpx.AsyncClient) -> None:
    """And between them the answers have all that is meant."""
    told = {kind: await check(client, kind, FULL) for kind in KINDS}
    for kind, (_, fields) in KINDS.items():
        texts = [one["text"] + one["reasoning"] + str(one["calls"]) for one in told[kind]]
        assert len(set(texts)) > 1, f"{kind}: the answers differ"
        if "stop" in fields:
            assert any(one["end"][1] in fields["stop"] for one in told[kind]), f"{kind}: a stop string ended some"
        if "regex" in fields or "call" in kind:
            assert any(set(WIDE + "üŌ東é") & set(text) for text in texts), f"{kind}: whole wide characters"
        if "thinking" in kind:
            assert any(one["reasoning"] for one in told[kind]), f"{kind}: some think"
    ends = {one["end"][0] for kind in KINDS for one in told[kind]}
    assert ends == {"stop", "length", "tool_calls", "completed", "incomplete"}
