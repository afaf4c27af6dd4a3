"""Answers with the log probabilities of their prompts: OpenAI's arrays, vLLM's field, and no more than is wanted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api import prompt_logprobs
from server.api.answers import finite
from server.api.lanes import Lane
from server.api.prompt_logprobs import sglang_arrays, token_offsets
from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import ANSWER, FakeBackend
from tests.api.harness import CHAT, COMPLETIONS, HELLO, chat, client_of, complete, error_of, events
from tests.support.fake_scores import rows_of

PROMPT = "äh 🦊 ja"
GENERATE = "/generate"


def score_of(ids: Sequence[int], position: int) -> float:
    """What the fake engine says of a token of a prompt."""
    return -ids[position] - position / 4096


def joined(chunks: list[Any]) -> tuple[str, dict[str, list[Any]]]:
    """Text and log probabilities of a stream with one choice."""
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    arrays: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            arrays.setdefault(name, []).extend(values or [])
    return "".join(choice["text"] for choice in choices), arrays


@pytest.mark.parametrize("max_tokens", [0, 50])
async def test_echo_has_the_prompts_log_probabilities_before_the_answers(
    client: httpx.AsyncClient, tokenizer: Tokenizer, max_tokens: int
) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = (await complete(client, prompt=PROMPT, echo=True, logprobs=2, max_tokens=max_tokens)).json()
    choice, usage = answer["choices"][0], answer["usage"]
    logprobs = choice["logprobs"]
    n_answer = usage["completion_tokens"]
    assert choice["text"] == PROMPT + (ANSWER if max_tokens else "")
    assert choice["finish_reason"] == ("stop" if max_tokens else "length")
    assert (usage["prompt_tokens"], n_answer > 0) == (len(ids), max_tokens > 0)
    assert all(len(values) == len(ids) + n_answer for values in logprobs.values())
    assert logprobs["token_logprobs"][: len(ids)] == [None, *(score_of(ids, i) for i in range(1, len(ids)))]
    assert logprobs["token_logprobs"][len(ids) :] == [-0.5] * n_answer
    assert logprobs["top_logprobs"][0] is None
    assert all(
        entry[name] == value or len(entry) == 3
        for entry, name, value in zip(
            logprobs["top_logprobs"][1:], logprobs["tokens"][1:], logprobs["token_logprobs"][1:], strict=True
        )
    )
    streamed = await events(client, prompt=PROMPT, echo=True, logprobs=2, max_tokens=max_tokens)
    assert joined(streamed) == (choice["text"], logprobs)


async def test_places_are_those_in_the_text(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    """A token of a part of a character has the place of the character; the beginning of sentence has none."""
    for prompt in (PROMPT, tokenizer.encode(PROMPT)):
        answer = await complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] is None
        pairs = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
        assert pairs[0] == ("<bos>", 0)
        assert pairs[1][1] == 0
        for token, place in pairs[1:]:
            assert token.startswith("bytes:") or PROMPT.startswith(token, place), (token, place)
        fox = PROMPT.index("🦊")
        assert [place for token, place in pairs if token.startswith("bytes:") and place == fox]


async def test_several_prompts_and_samples_have_each_their_own(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    prompts = ["ab", "xyz"]
    answer = await complete(client, prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=0)
    choices = answer.json()["choices"]
    for i, choice in enumerate(choices):
        ids = tokenizer.encode(prompts[i // 2])
        assert (choice["index"], choice["text"]) == (i, prompts[i // 2])
        assert choice["logprobs"]["token_logprobs"] == [None, *(score_of(ids, j) for j in range(1, len(ids)))]
    chunks = await events(client, prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=0)
    streamed = {c["index"]: c["logprobs"] for chunk in chunks[:-1] for c in chunk["choices"] if c["logprobs"]}
    assert streamed == {choice["index"]: choice["logprobs"] for choice in choices}


async def test_vllms_field_is_by_token_id(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    choice = (await complete(client, prompt="ab", prompt_logprobs=1)).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == (ANSWER, None)
    found = choice["prompt_logprobs"]
    assert found[0] is None
    assert found[1] == {
        str(ids[1]): {"logprob": score_of(ids, 1), "rank": 2, "decoded_token": tokenizer.token_text(ids[1])},
        str(ids[0]): {"logprob": 0.0, "rank": 1, "decoded_token": tokenizer.token_text(ids[0])},
    }
    assert len(found) == len(ids)
    own = (await complete(client, prompt="ab", prompt_logprobs=0)).json()["choices"][0]["prompt_logprobs"]
    assert [list(entry) for entry in own[1:]] == [[str(token_id)] for token_id in ids[1:]]


async def test_chat_has_the_field_beside_the_choices(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer = (await chat(client, prompt_logprobs=2, n=2)).json()
    assert len(answer["prompt_logprobs"]) == len(backend.requests[0].prompt_ids)
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])
    nothing = (await chat(client, prompt_logprobs=0, max_tokens=0)).json()
    assert nothing["choices"][0]["message"]["content"] == ""
    assert nothing["choices"][0]["finish_reason"] == "length"
    assert nothing["usage"]["completion_tokens"] == 0
    assert "prompt_logprobs" not in (await chat(client)).json()


async def test_both_fields_together_are_computed_once(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    choice = (await complete(client, prompt="ab", echo=True, logprobs=3, prompt_logprobs=1)).json()["choices"][0]
    assert backend.requests[0].sampling.prompt_logprobs == 3
    assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0, 2, 2]
    assert [len(entry or ()) for entry in choice["logprobs"]["top_logprobs"][:3]] == [0, 4, 3]


async def test_who_does_not_ask_gets_none(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for body in ({}, {"echo": True}, {"logprobs": 2}):
        choice = (await complete(client, **body)).json()["choices"][0]
        assert "prompt_logprobs" not in choice
    assert [request.sampling.prompt_logprobs for request in backend.requests] == [None] * 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
async def test_what_has_no_meaning_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(await client.post(path, json=body), 400)["param"] == param


async def test_too_many_are_refused_before_anything_is_computed(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.prompt_logprobs.MAX_ENTRIES", 200)
    prompts = [[5] * 30, [6] * 21]
    for body, param in (({"echo": True, "logprobs": 1}, "logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs")):
        error = error_of(await complete(client, prompt=prompts, n=2, **body), 400)
        assert error["param"] == param
        assert "in each of 2 samples are 204: at most 200" in error["message"]
    assert not backend.requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "max_tokens": 26, "logprobs": 1}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "n": 2, "max_tokens": 52, "logprobs": 1, "stream": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "best_of": 4, "max_tokens": 51}, "best_of"),
        (
            CHAT,
            {"messages": HELLO, "n": 4, "max_completion_tokens": 26, "logprobs": True, "top_logprobs": 1},
            "logprobs",
        ),
        (CHAT, {"messages": HELLO, "max_tokens": 201, "logprobs": True}, "logprobs"),
        (GENERATE, {"text": "x", "return_logprob": True, "sampling_params": {"max_new_tokens": 201}}, "return_logprob"),
        (
            GENERATE,
            {
                "text": ["x", "y"],
                "return_logprob": True,
                "top_logprobs_num": 1,
                "sampling_params": {"max_new_tokens": 51},
            },
            "return_logprob",
        ),
    ],
)
async def test_those_of_the_answers_are_bounded_before_anything_is_computed(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    """The limit is of them all: tokens, alternatives, samples and prompts."""
    monkeypatch.setattr("server.engine.prompt_logprobs.MAX_ENTRIES", 200)
    error = error_of(await client.post(path, json=body), 400)
    assert error["param"] == param
    assert "at most 200 are given" in error["message"]
    assert not backend.requests


async def test_where_no_length_is_asked_for_the_limit_shortens_the_answers(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.engine.prompt_logprobs.MAX_ENTRIES", 200)
    assert (await complete(client, n=5, logprobs=1)).status_code == 200
    assert {request.sampling.max_tokens for request in backend.requests} == {20}
    assert (await complete(client, n=5)).status_code == 200
    assert backend.requests[-1].sampling.max_tokens == 64


@pytest.mark.parametrize("stream", [False, True])
async def test_many_are_spelled_in_a_thread_of_their_own(
    client: httpx.AsyncClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("server.api.requests.INLINE_ENTRIES", 20)
    monkeypatch.setattr("server.api.streaming.INLINE_ENTRIES", 20)
    names: list[str] = []
    arrays = prompt_logprobs.openai_arrays

    def noted(*args: Any) -> dict[str, Any]:
        names.append(threading.current_thread().name)
        return arrays(*args)

    monkeypatch.setattr("server.api.completions.openai_arrays", noted)
    lane: Lane = app.state.answers_lane
    for n_ids, is_long in ((3, False), (60, True)):
        names.clear()
        body = {"prompt": [7] * n_ids, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
        assert (await complete(client, **body)).status_code == 200
        assert len(names) == 1
        assert names[0].startswith(lane.name) == is_long


LONG_TEXT = {"max_tokens": 30, "n": 2, "logprobs": 3}
LONG_CHAT = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 30,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 3,
}
LONG_GENERATE = {"text": "a", "sampling_params": {"max_new_tokens": 30}, "return_logprob": True, "top_logprobs_num": 3}


@pytest.mark.parametrize(
    ("path", "module", "body"),
    [
        ("/v1/completions", "completions", {"prompt": "a", **LONG_TEXT}),
        ("/v1/chat/completions", "chat_writer", LONG_CHAT),
        ("/generate", "generate", LONG_GENERATE),
        ("/generate", "generate", {**LONG_GENERATE, "stream": True}),
    ],
)
async def test_many_of_an_answer_are_spelled_in_a_thread_too(
    client: httpx.AsyncClient,
    app: FastAPI,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    module: str,
    body: dict[str, Any],
) -> None:
    """All of them at once, at the end of an answer, or again and again in a stream that repeats them."""
    backend.script.answer_ids = [10 + i for i in range(30)]
    monkeypatch.setattr("server.api.requests.INLINE_ENTRIES", 20)
    monkeypatch.setattr("server.api.streaming.INLINE_ENTRIES", 20)
    names: Counter[str] = Counter()

    def noted(logprob: float) -> float:
        names[threading.current_thread().name] += 1
        return finite(logprob)

    monkeypatch.setattr(f"server.api.{module}.finite", noted)
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    lane: Lane = app.state.answers_lane
    n_inline = sum(n for name, n in names.items() if not name.startswith(lane.name))
    assert sum(names.values()) >= 120
    assert n_inline <= (60 if body.get("stream") else 0)  # its first chunks are short


async def test_a_prefill_node_leaves_them_to_the_decode_node(tokenizer: Tokenizer) -> None:
    """Routers drop its answer to these routes, and the decode node's has them."""
    prefill = FakeBackend(tokenizer, "prefill")
    async with client_of(prefill) as client:
        for max_tokens in (0, 9):
            body = {"echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": max_tokens}
            assert (await complete(client, bootstrap_room=7 + max_tokens, **body)).status_code == 200
    found = [(each.sampling.prompt_logprobs, each.sampling.max_tokens) for each in prefill.requests]
    assert found == [(None, 0), (None, 1)]


def test_sglangs_arrays_begin_where_they_are_asked_to(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    found = PromptLogprobs(2, rows_of(ids, 2))
    whole = sglang_arrays(tokenizer, ids, found, n_top=1, with_text=True)
    assert whole["input_token_logprobs"][0] == [None, ids[0], "<bos>"]
    assert whole["input_token_logprobs"][1] == [score_of(ids, 1), ids[1], tokenizer.token_text(ids[1])]
    assert whole["input_top_logprobs"][:2] == [None, [[0.0, ids[0], "<bos>"]]]
    later = sglang_arrays(tokenizer, ids, found, start=2)
    assert later == {"input_token_logprobs": [[score_of(ids, i), ids[i], None] for i in range(2, len(ids))]}


# --- places -----------------------------------------------------------------------------------------------------------


def test_broken_characters_have_places_too(tokenizer: Tokenizer) -> None:
    fox = tokenizer.encode("🦊")[1:]
    assert len(fox) == 4, "one token for each byte"
    cases: list[tuple[list[int], list[int]]] = [
        (fox, [0, 0, 0, 0]),
        ([*fox[:2], *tokenizer.encode("a")[1:], *fox], [0, 0, 1, 2, 2, 2, 2]),
        ([*fox[:2], *fox], [0, 0, 1, 1, 1, 1]),
        (fox[:3], [0, 0, 0]),
    ]
    for ids, places in cases:
        assert token_offsets(tokenizer, ids, tokenizer.decode(ids)) == places


def test_a_special_token_has_a_place_where_the_text_spells_it(tokenizer: Tokenizer) -> None:
    text = "a<eos>b"
    ids = tokenizer.encode(text)
    places = dict(zip(map(tokenizer.token_text, ids), token_offsets(tokenizer, ids, text), strict=True))
    assert places == {"<bos>": 0, "a": 0, "<eos>": 1, "b": 6}
    decoded = tokenizer.decode(ids)
    assert (decoded, token_offsets(tokenizer, ids, decoded)) == ("ab", [0, 0, 1, 1])


class Lowering:
    """A tokenizer whose text is not its bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return "AB CD"[token_id : token_id + 1].encode()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("ab cd"[i] for i in ids)


def test_where_bytes_are_not_the_text_it_is_decoded_token_by_token() -> None:
    tokenizer: Any = Lowering()
    assert token_offsets(tokenizer, [0, 1, 2, 3, 4], "ab cd") == [0, 1, 2, 3, 4]
    assert token_offsets(tokenizer, [0, 1, 2, 3, 4], "abc") == [0, 1, 2, 3, 3]
