from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash

from server.api.requests import sample_seed
from server.engine.request import SamplingParams
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import ANSWER, FakeBackend
from tests.api.harness import complete, events


async def test_answers_a_text(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    answer = await complete(client)
    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (ANSWER, "stop", 0)
    n_prompt, n_answer = len(tokenizer.encode("How many?")), len(tokenizer.encode(ANSWER)[1:]) + 1
    assert body["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert backend.requests[0].prompt_ids == tuple(tokenizer.encode("How many?"))
    assert backend.all_over()


@pytest.mark.parametrize(
    ("prompt", "n_prompts"),
    [("one", 1), (["one", "two"], 2), ([5, 6, 7], 1), ([[5, 6], [7], [8]], 3), (["just one"], 1)],
)
async def test_takes_all_kinds_of_prompts(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer, prompt: Any, n_prompts: int
) -> None:
    answer = await complete(client, prompt=prompt)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(n_prompts))
    assert [choice["text"] for choice in answer.json()["choices"]] == [ANSWER] * n_prompts
    sent = [list(request.prompt_ids) for request in backend.requests]
    given = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    assert sent == [tokenizer.encode(p) if isinstance(p, str) else p for p in given]
    assert len({request.request_id for request in backend.requests}) == n_prompts


async def test_headers_name_the_prefill_node_and_the_rooms(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    room = backend.first_room
    assert room is not None
    answer = await complete(client, prompt=["a", "b"])
    assert answer.headers["x-pd-prefill"] == "10.0.0.1:8998"
    assert answer.headers["x-pd-room"] == f"{room},{room + 1}"
    streamed = await complete(client, stream=True)
    assert streamed.headers["x-pd-room"] == str(room + 2)
    backend.first_room = None
    local = await complete(client)
    assert local.headers["x-pd-prefill"] == "local"
    assert "x-pd-room" not in local.headers


async def test_a_header_counts_the_prompts_that_another_prefill_node_computed(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    assert "x-pd-retries" not in (await complete(client)).headers
    backend.script.n_retries = 1
    assert (await complete(client, prompt=["a", "b"])).headers["x-pd-retries"] == "2"


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await complete(
        client,
        max_tokens=20,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=11,
        stop=["\n", "x"],
        stop_token_ids=[9],
        ignore_eos=False,
        logprobs=2,
        user="me",
        best_of=1,
        some_unknown_field={"a": 1},
    )
    assert backend.requests[0].sampling == SamplingParams(
        max_tokens=20,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=11,
        stop=("\n", "x"),
        stop_token_ids=(9,),
        logprobs=2,
    )


async def test_defaults_are_the_backends_and_null_means_default(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.sampling_defaults = SamplingParams(max_tokens=50, temperature=0.7, top_k=3)
    await complete(client, temperature=None, max_tokens=None, stop=None, n=None, stream=None, seed=None, logprobs=None)
    assert backend.requests[0].sampling == backend.sampling_defaults
    await complete(client, top_k=-1, temperature=0, stop="end")
    assert backend.requests[1].sampling == SamplingParams(max_tokens=50, stop=("end",))


async def test_default_max_tokens_shrinks_to_the_context(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await complete(client, prompt=[5] * 250)
    assert backend.requests[0].sampling.max_tokens == 6


async def test_samples_get_their_own_seeds(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer = await complete(client, prompt=["a", "b"], n=3, seed=2**63 - 2)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(6))
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds == [sample_seed(2**63 - 2, i) for i in range(3)] * 2
    assert seeds[0] == 2**63 - 2, "one sample is drawn with the seed that was asked for"
    n_prompt = answer.json()["usage"]["prompt_tokens"]
    assert n_prompt == len(backend.requests[0].prompt_ids) + len(backend.requests[3].prompt_ids)
    await complete(client, n=2)
    assert [request.sampling.seed for request in backend.requests[6:]] == [None, None]


async def test_samples_and_prompts_of_one_request_are_a_group(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """They take turns with other requests."""
    await complete(client, prompt=["a", "b"], n=2)
    await complete(client, n=2)
    await complete(client)
    groups = [request.group for request in backend.requests]
    assert groups == [groups[0]] * 4 + [groups[4]] * 2 + [""]
    assert len({*groups}) == 3


async def test_seeds_share_no_samples(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for seed in (-(2**63), -1, 0, 1, 5, 6, 2**63 - 1):
        await complete(client, n=128, seed=seed)
    seeds = [request.sampling.seed for request in backend.requests]
    assert len(set(seeds)) == len(seeds) == 7 * 128
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)


def test_the_seed_of_a_sample_is_the_documented_hash() -> None:
    rule = "xxh3_64 of the seed (int64) and i (uint64), both little-endian, read as int64"
    assert rule in (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    hashed = xxhash.xxh3_64_intdigest((5).to_bytes(8, "little", signed=True) + (1).to_bytes(8, "little"))
    assert sample_seed(5, 1) % 2**64 == hashed


async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = await complete(client, prompt=["äh 1", "b"], echo=True)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["äh 1" + ANSWER, "b" + ANSWER]
    answer = await complete(client, prompt=tokenizer.encode("ids"), echo=True)
    assert answer.json()["choices"][0]["text"] == "ids" + ANSWER
    chunks = await events(client, prompt="äh", echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "äh" + ANSWER


async def test_an_answer_that_finishes_the_prompts_character_takes_its_place(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer
) -> None:
    """Without echo the character alone; with echo prompt and answer are the text of both together."""
    cut = tokenizer.encode("ab日")[:-1]
    for answer, finishes in (("x日", False), ("日", True), ("", True)):
        ids = [*(tokenizer.encode("ab日")[-1:] if finishes else []), *tokenizer.encode(answer)[1:]]
        backend.script.answer_ids = ids
        whole = tokenizer.decode([*cut, *ids])
        plain = (await complete(client, prompt=cut)).json()["choices"][0]["text"]
        assert plain == whole.removeprefix("ab" if finishes else "ab\ufffd")
        assert (await complete(client, prompt=cut, echo=True)).json()["choices"][0]["text"] == whole
        chunks = await events(client, prompt=cut, echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole


async def test_a_prompt_that_ends_in_a_replacement_character_is_not_answered_with_it(
    client: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    for prompt in ("ab\ufffd", tokenizer.encode("\ufffd\ufffd"), tokenizer.encode("日")[:-1]):
        own = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        assert (await complete(client, prompt=prompt)).json()["choices"][0]["text"] == ANSWER
        assert (await complete(client, prompt=prompt, echo=True)).json()["choices"][0]["text"] == own + ANSWER
        chunks = await events(client, prompt=prompt, echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == own + ANSWER


async def test_logprobs_list_every_token(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    answer = await complete(client, logprobs=2)
    logprobs = answer.json()["choices"][0]["logprobs"]
    ids = tokenizer.encode(ANSWER)[1:]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["tokens"][-1] == "<eos>"
    assert r"bytes:\xf0" in logprobs["tokens"]  # a quarter of the fox
    assert logprobs["token_logprobs"] == [-0.5] * (len(ids) + 1)
    assert logprobs["text_offset"] == [len(tokenizer.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids) + 1)]
    assert len(logprobs["top_logprobs"][0]) == 3  # the two best and the chosen one
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0
    assert (await complete(client)).json()["choices"][0]["logprobs"] is None
    assert (await complete(client, logprobs=0)).json()["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_stop_string_cuts_the_text(client: httpx.AsyncClient) -> None:
    [choice] = (await complete(client, stop=["zzz", " 42"])).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Tom has", "stop", " 42")


async def test_max_tokens_is_a_length_finish(client: httpx.AsyncClient) -> None:
    body = (await complete(client, max_tokens=2)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("tokens_a_step", [1, 4])
async def test_stream_adds_up_to_the_whole(client: httpx.AsyncClient, backend: FakeBackend, tokens_a_step: int) -> None:
    backend.script.tokens_a_step = tokens_a_step
    chunks = await events(client, prompt="x")
    assert chunks[-1] == "[DONE]"
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert "".join(texts) == ANSWER
    assert not any("\ufffd" in text for text in texts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(texts) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert backend.all_over()


async def test_stream_with_usage(client: httpx.AsyncClient) -> None:
    whole = (await complete(client, prompt="x")).json()["usage"]
    chunks = await events(client, prompt="x", stream_options={"include_usage": True})
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == whole
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    chunks = await events(client, prompt="x", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == whole["completion_tokens"]


async def test_stream_of_several_samples_keeps_them_apart(client: httpx.AsyncClient) -> None:
    chunks = await events(client, prompt=["x", "y"], n=2, stop=" 42", stream_options={"include_usage": True})
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-2]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"Tom has"}
    assert sum(c["choices"][0]["finish_reason"] == "stop" for c in chunks[:-2]) == 4


async def test_stream_with_logprobs(client: httpx.AsyncClient) -> None:
    chunks = await events(client, prompt="x", logprobs=1)
    whole = (await complete(client, prompt="x", logprobs=1)).json()["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    for name in whole:
        assert [value for part in parts for value in part[name]] == whole[name]
