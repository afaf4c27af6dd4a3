"""Penalties, biases, bans and best_of: what arrives at the backend, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from server.api.sampling_fields import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_BIASES
from server.engine.request import SamplingParams
from tests.api.fakes import FakeBackend
from tests.api.harness import chat, complete, error_of, events

ALL = {
    "presence_penalty": -0.5,
    "frequency_penalty": 2,
    "repetition_penalty": 1.1,
    "min_p": 0.05,
    "logit_bias": {"7": -100, "8": 1.5},
    "allowed_token_ids": [5, 6],
}
ALL_PARAMS = SamplingParams(
    max_tokens=64,
    presence_penalty=-0.5,
    frequency_penalty=2.0,
    repetition_penalty=1.1,
    min_p=0.05,
    logit_bias=((7, -100.0), (8, 1.5)),
    allowed_token_ids=(5, 6),
)


@pytest.mark.parametrize("ask", [complete, chat])
async def test_everything_arrives(client: httpx.AsyncClient, backend: FakeBackend, ask: Any) -> None:
    assert (await ask(client, **ALL)).status_code == 200
    assert backend.requests[0].sampling == ALL_PARAMS


async def test_the_checkpoint_s_defaults_count_where_a_request_says_nothing(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.sampling_defaults = replace(backend.sampling_defaults, repetition_penalty=1.2, min_p=0.1)
    await complete(client, repetition_penalty=1.0)
    await complete(client)
    assert [(r.sampling.repetition_penalty, r.sampling.min_p) for r in backend.requests] == [(1.0, 0.1), (1.2, 0.1)]


async def test_values_that_change_nothing_are_taken(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    nothing = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "min_p": 0}
    assert (await complete(client, **nothing, allowed_token_ids=None)).status_code == 200
    assert backend.requests[0].sampling == SamplingParams(max_tokens=64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("min_p", 1.5),
        ("logit_bias", {"7": 101}),
        ("logit_bias", {"seven": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"9" * 30: 1}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {str(i): 1 for i in range(MAX_BIASES + 1)}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [99999]),
        ("allowed_token_ids", [5] * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", ["a" * (MAX_BAD_WORD_CHARS + 1)]),
        ("bad_words", ["a"] * (MAX_BAD_WORDS + 1)),
        ("bad_words", [3]),
        ("best_of", 0),
        ("best_of", 129),
        ("suffix", "the end"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_is_out_of_range_is_refused_by_name(
    client: httpx.AsyncClient, backend: FakeBackend, name: str, value: Any
) -> None:
    error = error_of(await complete(client, **{name: value}), 400)
    assert error["param"].startswith(name)
    assert backend.requests == []


async def test_bad_words_are_banned_in_both_spellings(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """As at the beginning of a text, and behind a space where that is another first token and no longer."""
    tokenizer = backend.tokenizer
    assert (await complete(client, bad_words=["Tom", "  has"])).status_code == 200
    words = backend.requests[0].sampling.bad_words
    for text in ("Tom", "has"):
        assert tuple(tokenizer.encode_rendered(text)) in words
    for word in words:
        assert tokenizer.decode(word).strip() in ("Tom", "has")


async def test_best_of_answers_with_the_most_likely(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """Every token of the fake backend is as likely as any other: the shortest answer is the best."""
    answer = (await complete(client, best_of=3, n=2, max_tokens=4)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 12
    assert [r.sampling.logprobs for r in backend.requests] == [0, 0, 0]
    assert len({r.sampling.seed for r in backend.requests}) == 1, "no seed is given"


async def test_best_of_ranks_by_the_sum_of_log_probabilities(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """Seeds are the samples' own, so the best one can be told by its number of tokens."""
    backend.script.answer_ids = None
    seen: list[int] = []
    submit = backend.submit

    def shorter(request: Any) -> Any:
        seen.append(len(seen))
        length = [6, 2, 4][len(seen) - 1]
        return submit(replace(request, sampling=replace(request.sampling, max_tokens=length)))

    backend.submit = shorter  # type: ignore[method-assign]
    answer = (await complete(client, best_of=3, n=2, logprobs=1)).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [2, 4]


async def test_best_of_needs_enough_and_no_stream(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert error_of(await complete(client, best_of=2, n=3), 400)["param"] == "best_of"
    assert error_of(await complete(client, best_of=3, n=2, stream=True), 400)["param"] == "best_of"
    assert error_of(await complete(client, best_of=128, prompt=["a"] * 3), 400)["param"] == "n"
    assert (await events(client, prompt="x", best_of=2, n=2))[-1] == "[DONE]"
    assert len(backend.requests) == 2


async def test_best_of_answers_each_prompt(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer = (await complete(client, prompt=["one", "two"], best_of=2, echo=True)).json()
    assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "two"]
    assert len(backend.requests) == 4
