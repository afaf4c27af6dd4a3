"""The ``openai`` client against two real processes: what it gets, how it is refused, and that nobody is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from cluster import Pair

from server.api.answers import token_key
from server.engine.tokenizer import Tokenizer
from server.model.interface import LoadedModel
from tests.support.chat import conversation_ids
from tests.support.pair import Side, a_request, answer, running_decode
from tests.support.processes import process_pair

MODEL = "tiny-dsv4"
SLOTS, PAGES = 2, 8
CONTEXT = PAGES * 256
OPTIONS = ("--slots", str(SLOTS), "--pages", str(PAGES), "--poison", "--permute-ids")
MESSAGES: Any = [
    {"role": "system", "content": "You answer shortly."},
    {"role": "user", "content": "Anna has 3 apples and buys 4 more. How many has she?"},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with process_pair(tmp_path_factory.mktemp("pair"), (*OPTIONS, "11"), (*OPTIONS, "12")) as pair:
        yield pair


@pytest.fixture
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.d.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    pair.wait_all_free()


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, CONTEXT)


def test_a_completion_names_its_prefill_node_and_room(client: openai.OpenAI, pair: Pair) -> None:
    before = pair.p.metrics().get("pd_rooms_total{outcome=committed,reason=}", 0)
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="one two three", max_tokens=5)
    assert raw.headers["x-pd-prefill"] == pair.address
    assert int(raw.headers["x-pd-room"]) >= 0
    completion = raw.parse()
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 5
    assert completion.choices[0].finish_reason in ("stop", "length")
    pair.wait_all_free()
    assert pair.p.metrics()["pd_rooms_total{outcome=committed,reason=}"] == before + 1, "the prefill node did it"


def test_every_prompt_and_sample_is_a_room_of_its_own(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=3, temperature=0.9, seed=5
    )
    assert len(set(raw.headers["x-pd-room"].split(","))) == 4
    assert [choice.index for choice in raw.parse().choices] == [0, 1, 2, 3]


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI, pair: Pair) -> None:
    asked: Any = {"model": MODEL, "prompt": "one two three", "max_tokens": 20, "logprobs": 2}
    whole = client.completions.create(**asked)
    raw = client.completions.with_raw_response.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(raw.parse())
    assert (chunks[-1].model_extra or {})["pd"]["prefill"] == pair.address
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    logprobs = [
        x for c in chunks if c.choices and c.choices[0].logprobs for x in c.choices[0].logprobs.token_logprobs or []
    ]
    assert whole.choices[0].logprobs is not None
    assert logprobs == whole.choices[0].logprobs.token_logprobs, "the first token's too, which the prefill node sampled"


def test_a_prompt_is_scored_without_an_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "Tom has 3 äpfel 🦊 and buys 4 more."
    asked: Any = {"model": MODEL, "prompt": [prompt, "one two"], "max_tokens": 0, "echo": True, "logprobs": 2}
    whole = client.completions.create(**asked)
    found = whole.choices[0].logprobs
    assert found is not None
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (prompt, "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 0
    scores: list[float | None] = list(found.token_logprobs or [])
    assert len(scores) == len(tokenizer.encode(prompt))
    assert scores[0] is None
    offsets = found.text_offset or []
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(prompt) - 1
    chunks = [choice for chunk in client.completions.create(**asked, stream=True) for choice in chunk.choices]
    assert {choice.index: choice.logprobs for choice in chunks} == {c.index: c.logprobs for c in whole.choices}


def test_a_prompts_tokens_are_scored_as_those_of_an_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Bit for bit, on two nodes: what one decoded, the other computes as a prompt."""
    ids = tokenizer.encode("Anna has 3 apples and buys 4 more.")
    asked: Any = {"model": MODEL, "logprobs": 1, "temperature": 0}
    answer = client.completions.create(**asked, prompt=ids, max_tokens=12, extra_body={"ignore_eos": True})
    answered = answer.choices[0].logprobs
    assert answered is not None
    again = client.completions.create(**asked, prompt=prompt_of(answer, ids, tokenizer), max_tokens=0, echo=True)
    scored = again.choices[0].logprobs
    assert scored is not None
    assert (scored.token_logprobs or [])[len(ids) :] == answered.token_logprobs
    assert (scored.top_logprobs or [])[len(ids) :] == answered.top_logprobs


def prompt_of(answer: Any, ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The prompt with the answer behind it, token by token."""
    by_text = {token_key(tokenizer, i): i for i in range(tokenizer.vocab_size)}
    return [*ids, *(by_text[token] for token in answer.choices[0].logprobs.tokens)]


def test_a_chat_whole_and_streamed(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(conversation_ids(tokenizer, MESSAGES))
    streamed = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == whole.choices[0].message.content
    assert streamed[-1].usage == whole.usage


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        return (
            client.completions.create(
                model=MODEL,
                prompt="one two",
                max_tokens=12,
                temperature=1.0,
                seed=seed,
                extra_body={"ignore_eos": True},
            )
            .choices[0]
            .text
        )

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_a_stop_string_that_the_first_token_completes_ends_at_once(client: openai.OpenAI) -> None:
    def first_text(prompt: str) -> str:
        return client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).choices[0].text

    prompt, first = next((p, t) for p in map(str, range(100)) if (t := first_text(p)) and "\ufffd" not in t)
    stopped = client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, stop=[first])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == 1


TOO_LONG = [20] * (CONTEXT + 1)
REFUSED: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "no token": ({"prompt": []}, 400, ("prompt", "at least one token")),
    "too long": ({"prompt": TOO_LONG}, 400, (str(CONTEXT + 1), str(CONTEXT))),
    "no room for an answer": ({"prompt": TOO_LONG[1:]}, 400, (str(CONTEXT),)),
    "huge max_tokens": ({"prompt": [20] * 7, "max_tokens": 10**9}, 400, ("7", str(10**9), str(CONTEXT))),
    "one too many": ({"prompt": [20] * 7, "max_tokens": CONTEXT - 6}, 400, (str(CONTEXT - 7),)),
    "unknown model": ({"prompt": [20], "model": "gpt-9"}, 404, ("gpt-9", MODEL)),
}
"""What depends on the node; all else that is wrong with a request is in tests/api/test_errors.py."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(client: openai.OpenAI, name: str) -> None:
    fields, status, words = REFUSED[name]
    started = time.monotonic()
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"model": MODEL, **fields})
    assert time.monotonic() - started < 5.0
    assert caught.value.status_code == status
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.body is not None


def test_a_prompt_that_just_fits_is_served(client: openai.OpenAI) -> None:
    full = client.completions.create(
        model=MODEL, prompt=[20] * (CONTEXT - 3), max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert full.usage is not None
    assert full.usage.total_tokens == CONTEXT


async def test_sixty_four_at_once_on_two_slots_equal_the_local_answers(
    pair: Pair, model: LoadedModel, tokenizer: Tokenizer
) -> None:
    rng = random.Random(64)
    prompts = [rng.choices(range(10, 500), k=rng.randrange(1, 200)) for _ in range(64)]
    requests = [a_request(ids, max_tokens=1 + i % 5) for i, ids in enumerate(prompts)]
    async with running_decode(model, tokenizer, Side(), None) as (_, local):
        outputs = await asyncio.gather(*(answer(local, request) for request in requests))
        expected = ["".join(o.text for o in found) for found, _ in outputs]
    async with openai.AsyncOpenAI(
        base_url=f"{pair.d.url}/v1", api_key="none", max_retries=0, timeout=100, http_client=_wide_open()
    ) as client:

        async def one(ids: list[int], max_tokens: int) -> tuple[str, str]:
            raw = await client.completions.with_raw_response.create(
                model=MODEL, prompt=ids, max_tokens=max_tokens, extra_body={"ignore_eos": True}
            )
            assert raw.headers["x-pd-prefill"] == pair.address
            return raw.headers["x-pd-room"], raw.parse().choices[0].text

        answers = await asyncio.gather(*(one(r.prompt_ids, r.sampling.max_tokens) for r in requests))  # type: ignore[arg-type]
    assert [text for _, text in answers] == expected
    assert len({room for room, _ in answers}) == 64
    await asyncio.to_thread(pair.wait_all_free)


def _wide_open() -> Any:
    """A client of ``httpx``; the package is typed for a copy of it."""
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=100)
