from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from server.engine.tokenizer import Tokenizer
from tests.api.fakes import FakeBackend
from tests.api.harness import HELLO, backend_of, chat, client_of, complete, error_of

TEXT = "äpfel 🦊 and\nmore"


async def test_a_text_goes_to_ids_and_back(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = (await client.post("/tokenize", json={"model": "tiny", "prompt": TEXT})).json()
    ids = tokenizer.encode(TEXT)
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": TEXT}
    without = (await client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False})).json()
    assert without["tokens"] == ids[1:]


async def test_the_ids_are_those_that_a_completion_gets(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    ids = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]
    await complete(client, prompt=TEXT)
    await chat(client)
    assert backend.requests[0].prompt_ids == tuple(ids)
    answer = (await client.post("/tokenize", json={"messages": HELLO})).json()
    assert backend.requests[1].prompt_ids == tuple(answer["tokens"])
    bare = {"messages": HELLO, "add_generation_prompt": False}
    assert (await client.post("/tokenize", json=bare)).json()["count"] < answer["count"]


async def test_parts_of_characters_have_names_of_their_own(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "a🦊", "return_token_strs": True})).json()
    assert answer["token_strs"][:2] == ["<bos>", "a"]
    assert all(name.startswith("bytes:") for name in answer["token_strs"][2:])
    assert len(answer["token_strs"]) == answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 257}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: object, param: str) -> None:
    assert error_of(await client.post(path, json=body), 400 if param != "model" else 404)["param"] == param


async def test_no_ids_are_an_empty_text_and_unknown_fields_are_named(client: httpx.AsyncClient) -> None:
    answer = await client.post("/detokenize", json={"tokens": [], "colour": "red"})
    assert answer.json() == {"prompt": ""}
    assert answer.headers["x-ignored-fields"] == "colour"
    answer = await client.post("/tokenize", json={"prompt": "x", "shade": 1})
    assert answer.headers["x-ignored-fields"] == "shade"


async def test_a_text_longer_than_any_prompt_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with client_of(backend_of(tmp_path)) as client:
        answer = await client.post("/tokenize", json={"prompt": "x" * (1 << 20)})
    assert error_of(answer, 400)["code"] == "context_length_exceeded"


async def test_a_prefill_node_tokenizes_too(tokenizer: Tokenizer) -> None:
    async with client_of(FakeBackend(tokenizer, role="prefill")) as client:
        assert (await client.post("/tokenize", json={"prompt": TEXT})).status_code == 200
