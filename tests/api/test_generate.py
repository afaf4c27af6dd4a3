from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from server.api import generate
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import ANSWER, FakeBackend
from tests.api.harness import client_of, error_of, events_of

GENERATE = "/generate"


async def ask(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(GENERATE, json={"text": "How many?", **body})


async def test_an_answer_has_text_ids_and_what_is_known_of_it(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer
) -> None:
    body = {"max_new_tokens": 50, "temperature": 0.5, "top_k": -1, "stop": ["zzz"], "sampling_seed": 3}
    answer = await ask(client, rid="mine-1", sampling_params=body, model="unknown", log_metrics=True)
    assert "x-ignored-fields" not in answer.headers
    spelled = answer.json()
    ids = [*tokenizer.encode(ANSWER)[1:], 1]
    assert (spelled["text"], spelled["output_ids"]) == (ANSWER, ids)
    info = spelled["meta_info"]
    assert info["id"] == "mine-1"
    assert info["finish_reason"] == {"type": "stop", "matched": 1}
    assert info["prompt_tokens"] == len(tokenizer.encode("How many?"))
    assert (info["completion_tokens"], info["cached_tokens"]) == (len(ids), 0)
    assert info["e2e_latency"] > 0
    assert info["pd"]["room"] == answer.headers["x-pd-room"]
    assert "output_token_logprobs" not in info
    [request] = backend.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (50, 0.5, 0, 3)
    assert sampling.stop == ("zzz",)


async def test_what_ended_an_answer_is_named(client: httpx.AsyncClient) -> None:
    reasons = []
    for sampling in ({"max_new_tokens": 3}, {"stop": "42"}, {"stop_token_ids": [5]}):
        spelled = (await ask(client, sampling_params=sampling)).json()
        reasons.append(spelled["meta_info"]["finish_reason"])
    assert reasons[:2] == [{"type": "length", "length": 3}, {"type": "stop", "matched": "42"}]
    assert reasons[2] == {"type": "stop", "matched": 1}


async def test_as_many_tokens_as_in_sglang_are_the_default_and_fewer_where_they_do_not_fit(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await client.post(GENERATE, json={"input_ids": [5] * 10})
    await client.post(GENERATE, json={"input_ids": [5] * 200})
    assert [request.sampling.max_tokens for request in backend.requests] == [128, 56]
    answer = await client.post(GENERATE, json={"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 57}})
    assert error_of(answer, 400)["param"] == "sampling_params.max_new_tokens"


@pytest.mark.parametrize(
    ("body", "prompts", "is_list"),
    [
        ({"text": "a"}, ["a"], False),
        ({"text": ["a"]}, ["a"], True),
        ({"text": ["a", "bc"]}, ["a", "bc"], True),
        ({"input_ids": [5, 6]}, [[5, 6]], False),
        ({"input_ids": [[5, 6]]}, [[5, 6]], True),
        ({"input_ids": [[5, 6], [7]], "sampling_params": {"n": 2}}, [[5, 6], [5, 6], [7], [7]], True),
        ({"text": "a", "sampling_params": {"n": 2}}, ["a", "a"], True),
    ],
)
async def test_one_or_several(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer, body: Any, prompts: list[Any], is_list: bool
) -> None:
    answer = (await client.post(GENERATE, json=body)).json()
    assert isinstance(answer, list) == is_list
    wanted = [tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts]
    assert [request.prompt_ids for request in backend.requests] == wanted
    each = answer if is_list else [answer]
    assert [one["meta_info"]["prompt_tokens"] for one in each] == [len(ids) for ids in wanted]
    assert len({one["meta_info"]["id"] for one in each}) == len(each)
    streamed = events_of(await client.post(GENERATE, json={**body, "stream": True}))
    assert streamed.pop() == "[DONE]"
    assert {event.get("index") for event in streamed} == (set(range(len(prompts))) if is_list else {None})


async def test_several_have_the_names_that_they_are_given(client: httpx.AsyncClient) -> None:
    body = {"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": {"n": 2}}
    answers = (await client.post(GENERATE, json=body)).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "x", "y", "y"]


async def test_every_chunk_of_a_stream_has_all_so_far(client: httpx.AsyncClient) -> None:
    body = {"return_logprob": True, "top_logprobs_num": 2, "sampling_params": {"stop": ["never"]}}
    whole = (await ask(client, **body)).json()
    chunks = events_of(await ask(client, stream=True, **body))
    assert chunks.pop() == "[DONE]"
    assert len(chunks) == len(whole["output_ids"])
    for before, after in pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][:-1] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])
    last = chunks[-1]
    for spelled in (last, whole):
        for name in ("e2e_latency", "pd", "id"):
            del spelled["meta_info"][name]
    assert last == whole


async def test_long_streams_do_not_cost_the_square_of_their_length(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.script.answer_ids = [10 + i % 200 for i in range(200)]
    monkeypatch.setattr(generate, "FREE_NBYTES", 100)
    monkeypatch.setattr(generate, "REPEATED_PARTS", 2)
    answer = await ask(client, stream=True, sampling_params={"max_new_tokens": 200})
    chunks = events_of(answer)[:-1]
    assert chunks[-1]["output_ids"] == backend.script.answer_ids
    assert 3 < len(chunks) < 30
    for before, after in pairwise(chunks[:-1]):
        n = len(after["output_ids"])
        assert n < 20 or n - len(before["output_ids"]) > n / 3


async def test_log_probabilities(client: httpx.AsyncClient) -> None:
    body = {"return_logprob": True, "logprob_start_len": -1, "sampling_params": {"max_new_tokens": 2}}
    info = (await ask(client, **body)).json()["meta_info"]
    assert info["input_token_logprobs"] == []
    assert [entry[0] for entry in info["output_token_logprobs"]] == [-0.5, -0.5]
    assert all(entry[2] is None for entry in info["output_token_logprobs"])
    assert "output_top_logprobs" not in info
    info = (await ask(client, **body, top_logprobs_num=2, return_text_in_logprobs=True)).json()["meta_info"]
    assert info["output_token_logprobs"][0][2] == "To"
    assert [entry[:2] for entry in info["output_top_logprobs"][0]] == [[-9999.0, 10], [-2.0, 11]]


async def test_log_probabilities_of_the_prompt_are_the_decode_nodes(tokenizer: Tokenizer) -> None:
    """Routers put a prefill node's before a decode node's, so only one of the two may have them."""
    ids = [5, 6, 7, 8]
    body = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 2, "bootstrap_room": 7}
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "sampling_params": {"max_new_tokens": 2}}
    for role in ("prefill", "decode"):
        backend = FakeBackend(tokenizer, role=role)
        async with client_of(backend) as client:
            whole = (await client.post(GENERATE, json={**body, "logprob_start_len": 0})).json()["meta_info"]
            later = (await client.post(GENERATE, json={**body, "logprob_start_len": 2})).json()["meta_info"]
            none = (await client.post(GENERATE, json={**body, "logprob_start_len": 9})).json()["meta_info"]
        assert (backend.requests[0].sampling.prompt_logprobs is None) == (role == "prefill")
        found = whole["input_token_logprobs"]
        if role == "prefill":
            assert found == later["input_token_logprobs"] == []
            continue
        assert [entry[1] for entry in found] == ids
        assert found[0] == [None, 5, None]
        assert all(entry[0] is not None for entry in found[1:])
        assert [len(entry or ()) for entry in whole["input_top_logprobs"]] == [0, 2, 2, 2]
        assert later["input_token_logprobs"] == found[2:]
        assert none["input_token_logprobs"] == []


async def test_a_prompt_may_be_scored_without_an_answer(client: httpx.AsyncClient) -> None:
    body = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    answer = (await ask(client, **body)).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]


async def test_everything_that_shapes_other_answers_shapes_these(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    sampling = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2}
    await ask(client, sampling_params={**sampling, "regex": "[a-z]+", "logit_bias": {"5": 1.0}, "max_new_tokens": 2})
    got = backend.requests[0].sampling
    assert (got.min_p, got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.1, 0.5, -1, 1.2)
    assert got.grammar is not None
    assert (got.grammar.kind, got.logit_bias) == ("regex", ((5, 1.0),))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [5]}, "text"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"text": None, "input_ids": "x"}, "input_ids"),
        ({"text": None, "input_ids": ["x"]}, "input_ids"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": None, "input_ids": [[]]}, "input_ids"),
        ({"text": None, "input_ids": [1 << 30]}, "input_ids"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"sampling_params": 5}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ({"sampling_params": {"stream": True}}, "stream"),
        ({"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
        ({"top_logprobs_num": 2}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"logprob_start_len": [0]}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
        ({"return_logprob": True, "stream": True, "sampling_params": {"max_new_tokens": 1 << 20}}, "return_logprob"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"sampling_params": {"regex": "[", "n": 2}}, "regex"),
        ({"token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"image_data": "x"}, "image_data"),
        ({"lora_path": "x"}, "lora_path"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"rid": "a b"}, "rid"),
        ({"bootstrap_room": 5.0}, "bootstrap_room"),
    ],
)
async def test_what_is_wrong_or_not_built_is_named(client: httpx.AsyncClient, body: Any, param: str) -> None:
    assert error_of(await ask(client, **body), 400)["param"] == param


async def test_unknown_fields_are_named(client: httpx.AsyncClient) -> None:
    answer = await ask(client, colour="red", sampling_params={"max_new_tokens": 1, "shade": 5})
    assert answer.headers["x-ignored-fields"] == "colour,sampling_params.shade"


async def test_the_body_of_a_router_is_taken_on_both_nodes(tokenizer: Tokenizer) -> None:
    """As ``smg`` 1.13.0 writes it."""
    body = {
        "text": "a b c",
        "model": "unknown",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "n": 1},
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "stream": False,
        "log_metrics": True,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
        "return_entropy": False,
        "rid": "r1",
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": 5001202504630320762,
    }
    for role, n_tokens in (("prefill", 1), ("decode", 4)):
        backend = FakeBackend(tokenizer, role=role)
        async with client_of(backend) as client:
            answer = await client.post(GENERATE, json=body)
            assert "x-ignored-fields" not in answer.headers
            info = answer.json()["meta_info"]
            assert info["finish_reason"] == {"type": "length", "length": n_tokens}
            assert len(info["output_token_logprobs"]) == n_tokens
            [request] = backend.requests
            assert request.routed is not None
            assert request.routed.room == body["bootstrap_room"]
            streamed = events_of(await client.post(GENERATE, json={**body, "stream": True}))
            assert streamed[-1] == "[DONE]"
            assert streamed[-2]["meta_info"]["completion_tokens"] == n_tokens


async def test_a_prefill_node_wants_a_room(tokenizer: Tokenizer) -> None:
    async with client_of(FakeBackend(tokenizer, role="prefill")) as client:
        assert error_of(await ask(client), 400)["code"] == "wrong_role"


async def test_a_stream_that_fails_ends_with_an_error_event(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script.fail_after = 2
    answer = await ask(client, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert events[-1]["error"]["component"] == "swa"
    assert backend.all_over()
