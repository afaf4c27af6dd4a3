from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.answers import Usage
from server.engine.request import TokenOutput
from server.engine.tokenizer import Tokenizer
from server.failure import Failure, RequestFailed
from tests.api.fakes import FakeBackend
from tests.api.harness import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MINIMAL,
    chat,
    client_of,
    complete,
    error_of,
    events,
    events_of,
    post,
    until,
)
from tests.support.byte_bpe import write_tokenizer_dir

WRONG_FIELDS = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 5.0),
    ("max_tokens", True),
    ("max_tokens", 10**400),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("min_tokens", 65),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 1.5),
    ("seed", 2**63),
    ("seed", "1"),
    ("seed", False),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("stop", "\ud800"),
    ("stop_token_ids", [400]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "x"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1),
    ("model", 7),
    ("user", 7),
]


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS)
async def test_wrong_field_is_a_400_that_names_it(
    client: httpx.AsyncClient, backend: FakeBackend, field: str, value: Any
) -> None:
    for path, required in MINIMAL.items():
        error = error_of(await post(client, path, {**required, field: value}), 400)
        assert error["param"].split(".")[0] == field
        assert field in error["message"]
        assert error["type"] == "invalid_request_error"
    assert backend.generations == []


WRONG_PROMPTS: list[Any] = [
    None,
    5,
    {},
    True,
    [],
    [[]],
    [[5], []],
    ["a", 5],
    [5, "a"],
    [5, True],
    [True],
    [5.0],
    [[5], "a"],
]


@pytest.mark.parametrize("prompt", [*WRONG_PROMPTS, [[5, None]], [5, 400], [[5], [6, -1]], "a\ud800"])
async def test_wrong_prompt_is_a_400(client: httpx.AsyncClient, prompt: Any) -> None:
    error_of(await post(client, COMPLETIONS, {"prompt": prompt}), 400)


@pytest.mark.parametrize("token_id", [4711, 10**6, -1])
async def test_token_id_outside_the_vocabulary_is_named(
    client: httpx.AsyncClient, tokenizer: Tokenizer, token_id: int
) -> None:
    error = error_of(await complete(client, prompt=[5, token_id]), 400)
    assert f"token id {token_id} is not in the vocabulary (0 to {tokenizer.vocab_size - 1})" in error["message"]


async def test_an_empty_prompt_among_others_is_named(client: httpx.AsyncClient) -> None:
    assert "prompt 1 is empty" in error_of(await complete(client, prompt=[[20], []]), 400)["message"]


async def test_prompt_of_no_tokens_is_a_400(tmp_path: Path) -> None:
    directory = write_tokenizer_dir(tmp_path)
    settings = json.loads((directory / "tokenizer.json").read_text())
    settings["post_processor"] = None
    (directory / "tokenizer.json").write_text(json.dumps(settings))
    async with client_of(FakeBackend(Tokenizer.load(directory))) as client:
        error = error_of(await complete(client, prompt=["x", ""]), 400)
    assert (error["code"], error["param"]) == ("empty_prompt", "prompt")


async def test_missing_fields_are_named(client: httpx.AsyncClient) -> None:
    assert error_of(await client.post(COMPLETIONS, json={}), 400)["param"] == "prompt"
    assert error_of(await client.post(CHAT, json={}), 400)["param"] == "messages"


WRONG_MESSAGES = [
    [],
    "hello",
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "wizard", "content": "x"}],
    [{"role": "user", "content": "\ud800"}],
    ["x"],
]


@pytest.mark.parametrize("messages", WRONG_MESSAGES)
async def test_wrong_messages_are_a_400(client: httpx.AsyncClient, messages: Any) -> None:
    error_of(await post(client, CHAT, {"messages": messages}), 400)


async def test_a_wrong_part_of_a_message_is_named(client: httpx.AsyncClient) -> None:
    messages = [*HELLO, {"role": "user", "content": 5}]
    error = error_of(await client.post(CHAT, json={"messages": messages}), 400)
    assert error["param"] == "messages.1.content"
    assert "string" in error["message"]
    assert "list" in error["message"]


async def test_combinations_that_are_refused(client: httpx.AsyncClient) -> None:
    assert error_of(await complete(client, n=2, best_of=1), 400)["param"] == "best_of"
    assert error_of(await complete(client, logprobs=21), 400)["param"] == "logprobs"
    assert error_of(await complete(client, logprobs=True), 400)["param"] == "logprobs"
    assert error_of(await complete(client, prompt=["x"] * 3, n=128), 400)["param"] == "n"
    assert error_of(await chat(client, top_logprobs=2), 400)["param"] == "top_logprobs"


async def test_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    error = error_of(await post(client, COMPLETIONS, {"model": "gpt\ud83d", "prompt": "x"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert (await client.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200  # none named: the served one


async def test_too_long_says_both_numbers(client: httpx.AsyncClient) -> None:
    error = error_of(await complete(client, prompt=[5] * 300), 400)
    assert error["code"] == "context_length_exceeded"
    assert "300" in error["message"]
    assert "256" in error["message"]
    error = error_of(await complete(client, prompt=[5] * 6, max_tokens=10**9), 400)
    assert error["param"] == "max_tokens"
    assert str(10**9) in error["message"]
    assert "256" in error["message"]


WRONG_BODIES = [b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b'{"prompt": ' + b"[" * 90_000, b"9" * 5000]


@pytest.mark.parametrize("content", WRONG_BODIES, ids=range(len(WRONG_BODIES)))
async def test_malformed_body_is_a_400(client: httpx.AsyncClient, content: bytes) -> None:
    error_of(await post(client, COMPLETIONS, content), 400)


async def test_body_that_is_not_declared_as_json_is_a_400(client: httpx.AsyncClient) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d says by itself
    answer = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=form)
    assert "Content-Type: application/json" in error_of(answer, 400)["message"]


async def test_wrong_method_and_unknown_path_have_the_same_shape(client: httpx.AsyncClient) -> None:
    answer = await client.get(COMPLETIONS)
    assert "GET" in error_of(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"
    assert "/v1/nothing" in error_of(await client.get("/v1/nothing"), 404)["message"]


@pytest.mark.parametrize(
    ("path", "allow"), [(COMPLETIONS, "POST"), ("/health", "GET, HEAD"), ("/metrics", "GET, HEAD")]
)
async def test_options_tells_the_method(client: httpx.AsyncClient, path: str, allow: str) -> None:
    answer = await client.options(path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allow, b"")


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_byte_are_status_codes(
    client: httpx.AsyncClient, backend: FakeBackend, stream: bool
) -> None:
    backend.script.refuse = RequestFailed(Failure("no_prefill", "no prefill node is connected"))
    answer = await complete(client, stream=stream)
    assert error_of(answer, 503)["code"] == "no_prefill"
    assert int(answer.headers["retry-after"]) > 0
    backend.script.refuse = None
    backend.script.route_error = RequestFailed(Failure("rejected", "swa: digest differs", "swa"))
    assert error_of(await complete(client, stream=stream), 502)["component"] == "swa"
    assert backend.all_over()


async def test_refusal_of_one_generation_aborts_the_others(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.refuse = RequestFailed(Failure("overloaded", "queue is full"))
    backend.script.refuse_from = 2
    error_of(await complete(client, n=4), 503)
    assert len(backend.generations) == 2
    assert all(generation.aborted for generation in backend.generations)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_failure_in_a_stream_is_an_error_event_without_done(
    client: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    backend.script.fail_after = 3
    chunks = await events(client, path, n=2, **MINIMAL[path])
    assert chunks[-1]["error"]["code"] == "engine_error"
    assert chunks[-1]["error"]["component"] == "swa"
    assert all(isinstance(chunk, dict) for chunk in chunks)
    assert backend.all_over()


async def test_failure_of_a_whole_answer_is_its_status(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.fail_after = 3
    assert error_of(await complete(client, n=2), 500)["code"] == "engine_error"
    assert backend.all_over()


async def test_an_answer_that_the_server_gives_up_is_never_a_success(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script.end = "abort"
    answer = await complete(client)
    assert answer.status_code >= 500
    assert answer.json()["error"]["code"] == "aborted"
    assert (await events(client, prompt="x"))[-1]["error"]["code"] == "aborted"


async def test_bug_is_a_500_in_the_same_shape(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Usage, "add", broken)
    assert "secret" not in error_of(await complete(client), 500)["message"]
    assert (await events(client, prompt="x"))[-1]["error"]["code"] == "internal_error"
    assert backend.all_over()


def test_a_bug_ends_a_stream_that_is_under_way(
    server_url: str, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real socket, where outputs are written in the call that brings them."""
    add, left = Usage.add, [3]

    def broken_later(usage: Usage, output: TokenOutput) -> None:
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError("secret")
        add(usage, output)

    monkeypatch.setattr(Usage, "add", broken_later)
    chunks = events_of(httpx.post(f"{server_url}{COMPLETIONS}", json={"prompt": "x", "stream": True}))
    assert len(chunks) <= 3
    assert all("choices" in chunk for chunk in chunks[:-1])
    assert chunks[-1]["error"]["code"] == "internal_error"
    until(backend.all_over)


def test_no_route_documents_a_422(app: FastAPI) -> None:
    assert '"422"' not in json.dumps(app.openapi())
