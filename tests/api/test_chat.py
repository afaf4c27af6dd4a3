from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from server.engine.tokenizer import Tokenizer
from tests.api.fakes import ANSWER, FakeBackend
from tests.api.harness import CHAT, HELLO, RESERVED, backend_of, chat, client_of, complete, error_of, events
from tests.support.chat import chat_ids


async def test_answers_a_conversation(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    body = (await chat(client)).json()
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert list(backend.requests[0].prompt_ids) == chat_ids(tokenizer, HELLO)
    assert body["usage"]["prompt_tokens"] == len(backend.requests[0].prompt_ids)


async def test_content_may_be_text_parts(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "How"}, {"type": "text", "text": "many?"}]
    await chat(client, messages=[{"role": "user", "content": parts}])
    expected = chat_ids(tokenizer, [{"role": "user", "content": "How\nmany?"}])
    assert list(backend.requests[0].prompt_ids) == expected


async def test_assistant_message_may_have_no_content(client: httpx.AsyncClient) -> None:
    messages = [*HELLO, {"role": "assistant", "content": None}, {"role": "user", "content": "x", "name": "Tom"}]
    assert (await chat(client, messages=messages)).status_code == 200


async def test_a_role_that_the_template_does_not_know_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'assistant' %}A: {% endif %}{{ m.content }}{% endfor %}"
    backend = backend_of(tmp_path, chat_template=template)
    async with client_of(backend) as client:
        answer = await chat(client, messages=[{"role": "wizard" * 100, "content": "x"}, *HELLO])
        error = error_of(answer, 400)
        assert (error["code"], error["param"]) == ("unknown_role", "messages")
        assert "does not know the role 'wizardwizard" in error["message"]
        assert len(error["message"]) < 200
        assert backend.requests == []
        assert (await chat(client)).status_code == 200


async def test_a_template_without_a_generation_prompt_refuses_to_leave_it_out(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    async with client_of(backend_of(tmp_path, chat_template=template)) as client:
        error = error_of(await chat(client, add_generation_prompt=False), 400)
        assert (await chat(client)).status_code == 200
    assert (error["param"], error["code"]) == ("add_generation_prompt", "unsupported")


async def test_no_chat_template_is_a_400_on_chat_only(tmp_path: Path) -> None:
    async with client_of(backend_of(tmp_path, chat_template=None)) as client:
        assert error_of(await chat(client), 400)["code"] == "no_chat_template"
        assert (await complete(client)).status_code == 200


async def test_template_kwargs(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    await chat(client, chat_template_kwargs={"thinking": True})
    assert tokenizer.decode(list(backend.requests[0].prompt_ids)).endswith("think")
    await chat(client, add_generation_prompt=False)
    assert list(backend.requests[1].prompt_ids) == chat_ids(tokenizer, HELLO, add_generation_prompt=False)


@pytest.mark.parametrize(
    "kwargs", [{"messages": []}, {"add_generation_prompt": True}, [], "x", *({name: 1} for name in RESERVED)]
)
async def test_template_kwargs_may_not_change_the_call(client: httpx.AsyncClient, kwargs: Any) -> None:
    message = error_of(await chat(client, chat_template_kwargs=kwargs), 400)["message"]
    assert all(name in message for name in kwargs if isinstance(kwargs, dict))


@pytest.mark.parametrize("name", ["tokenizer", "variables"])
async def test_template_kwargs_that_are_no_argument_of_the_call_reach_the_template(
    client: httpx.AsyncClient, name: str
) -> None:
    assert (await chat(client, chat_template_kwargs={name: 1})).status_code == 200


async def test_both_names_of_max_tokens(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await chat(client, max_tokens=3)
    await chat(client, max_completion_tokens=4)
    await chat(client, max_tokens=3, max_completion_tokens=4)
    assert [request.sampling.max_tokens for request in backend.requests] == [3, 4, 4]


async def test_stream_begins_with_the_role(client: httpx.AsyncClient) -> None:
    chunks = await events(client, CHAT, messages=HELLO, n=2, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    texts = {0: "", 1: ""}
    roles = {0: 0, 1: 0}
    for chunk in chunks[:-2]:
        assert chunk["object"] == "chat.completion.chunk"
        [choice] = chunk["choices"]
        roles[choice["index"]] += choice["delta"].get("role") == "assistant"
        assert roles[choice["index"]] == 1  # before any text
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: ANSWER, 1: ANSWER}
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"


async def test_logprobs(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    content = (await chat(client, logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == ANSWER
    assert content[-1]["token"] == "<eos>"
    assert len(content[0]["top_logprobs"]) == 2
    plain = (await chat(client, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert plain[0]["top_logprobs"] == []
    chunks = await events(client, CHAT, messages=HELLO, logprobs=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [entry for part in parts if part for entry in part["content"]] == plain
