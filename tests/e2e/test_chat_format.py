"""The chat format of DeepSeek-V4, forced calls and thinking: a pair says what one process says, whole and streamed.

Tools that the bundled model does not know, and temperatures: a grammar makes calls of what it writes. What it says by
itself is in `test_bundled_chat.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import Cluster, Node

from tests.api.deepseek import CALCULATOR

OPTIONS = ("--slots", "8", "--pages", "64", "--poison")
QUESTION = [{"role": "user", "content": "Tom has 8 bags with 8 books each. How many books does Tom have? 🦊"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Ōsaka"]},
                "days": {"enum": [1, 2]},
                "hourly": {"type": "boolean"},
            },
            "required": ["city", "days"],
        },
    },
}
TOOLS = [CALCULATOR, WEATHER]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "thinking": {"reasoning_effort": "low", "temperature": 1.0},
    "auto": {"tools": TOOLS, "temperature": 1.0, "n": 2},
    "required": {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0, "n": 3, "max_tokens": 160},
    "named": {"tools": TOOLS, "tool_choice": NAMED, "logprobs": True, "max_tokens": 160},
    "named, thinking": {"tools": TOOLS, "tool_choice": NAMED, "reasoning_effort": "max", "max_tokens": 60},
    "object": {"response_format": {"type": "json_object"}, "reasoning_effort": "low", "temperature": 0},
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """A decode node with drafts behind a prefill node, and one that does both without drafts."""
    logs: Path = tmp_path_factory.mktemp("chat")
    prefill = Node("prefill", logs / "prefill.log", *OPTIONS)
    decode = Node("decode", logs / "decode.log", "--prefill", prefill.address, "--spec-tokens", "2", *OPTIONS)
    local = Node("decode", logs / "local.log", "--local-prefill", *OPTIONS)
    with Cluster([prefill, decode, local]).running() as cluster:
        yield decode, local
        cluster.wait_all_free()


async def ask(node: Node, body: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """The choices of an answer, or of the chunks of a stream put together, without ids."""
    request = {"messages": QUESTION, "max_tokens": 64, "seed": 5, "stream": stream, **body}
    async with httpx.AsyncClient(base_url=node.url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    if not stream:
        return [plain(choice["message"], choice) for choice in answer.json()["choices"]]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    whole: list[dict[str, Any]] = [
        {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None, "logprobs": {"content": []}}
        for _ in range(body.get("n", 1))
    ]
    for choice in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        so_far, delta = whole[choice["index"]], choice["delta"]
        for name in ("content", "reasoning_content"):
            so_far[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                so_far["tool_calls"].append(call)
            else:
                so_far["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        so_far["finish_reason"] = choice["finish_reason"]
        so_far["logprobs"]["content"] += (choice["logprobs"] or {"content": []})["content"]
    return [plain(choice, choice) for choice in whole]


def plain(message: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [call["function"] for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
        "tokens": [entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"]],
    }


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_pair_says_what_one_process_says_whole_and_streamed(nodes: tuple[Node, Node], name: str) -> None:
    answers = await asyncio.gather(
        *(ask(node, REQUESTS[name], stream=stream) for node in nodes for stream in (False, True))
    )
    assert all(answer == answers[0] for answer in answers)
    for choice in answers[0]:
        assert "think>" not in choice["content"] + choice["reasoning"]
        if name in ("required", "named"):
            assert choice["calls"]
        if choice["finish_reason"] == "tool_calls":
            for call in choice["calls"]:
                assert isinstance(json.loads(call["arguments"]), dict)


async def test_a_forced_call_has_arguments_by_its_schema(nodes: tuple[Node, Node]) -> None:
    for seed in range(2):
        [choice] = await ask(
            nodes[0], {**REQUESTS["named"], "temperature": 1.0, "seed": seed, "max_tokens": 400}, stream=True
        )
        assert (choice["content"], choice["finish_reason"]) == ("", "tool_calls")
        [call] = choice["calls"]
        arguments = json.loads(call["arguments"])
        assert call["name"] == "get_weather"
        assert arguments["city"] in ("Bern", "Ōsaka")
        assert arguments["days"] in (1, 2)
        assert arguments.keys() <= {"city", "days", "hourly"}


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "required": {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0},
    "named, thinking": {"tools": TOOLS, "tool_choice": NAMED, "reasoning_effort": "max"},
    "object": {"response_format": {"type": "json_object"}, "temperature": 0},
}


def as_response(body: dict[str, Any]) -> dict[str, Any]:
    """A request for chat completions, as the Responses API has it."""
    request: dict[str, Any] = {"input": QUESTION, "max_output_tokens": 64, "seed": 5, **body}
    if "tools" in request:
        request["tools"] = [{"type": "function", **tool["function"]} for tool in request["tools"]]
    if isinstance(request.get("tool_choice"), dict):
        request["tool_choice"] = {"type": "function", "name": request["tool_choice"]["function"]["name"]}
    if (effort := request.pop("reasoning_effort", None)) is not None:
        request["reasoning"] = {"effort": effort}
    if (response_format := request.pop("response_format", None)) is not None:
        request["text"] = {"format": response_format}
    return request


async def respond(node: Node, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The same of a response as :func:`plain` has of a chat completion."""
    async with httpx.AsyncClient(base_url=node.url, timeout=60) as client:
        answer = await client.post("/v1/responses", json={**as_response(body), "stream": stream})
    assert answer.status_code == 200, answer.text
    last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2]
    response = json.loads(last.partition("\ndata: ")[2])["response"] if stream else answer.json()
    items = response["output"]
    texts = [(item["type"], part["text"]) for item in items for part in item.get("content", ())]
    calls = [item for item in items if item["type"] == "function_call"]
    end = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return {
        "content": "".join(text for kind, text in texts if kind == "message"),
        "reasoning": "".join(text for kind, text in texts if kind == "reasoning"),
        "calls": [{"name": item["name"], "arguments": item["arguments"]} for item in calls],
        "finish_reason": end,
    }


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_response_is_the_chat_completion_of_the_same_conversation(nodes: tuple[Node, Node], name: str) -> None:
    [expected] = await ask(nodes[0], RESPONSES[name], stream=False)
    del expected["tokens"]
    answers = await asyncio.gather(
        *(respond(node, RESPONSES[name], stream=stream) for node in nodes for stream in (False, True))
    )
    assert answers == [expected] * 4
