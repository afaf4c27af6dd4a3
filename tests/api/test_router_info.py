from __future__ import annotations

import asyncio

import httpx
import pytest

from server.api import router_info
from server.engine.tokenizer import Tokenizer
from server.failure import Failure, RequestFailed
from tests.api.fakes import FakeBackend
from tests.api.harness import client_of, error_of, until_async


async def test_the_older_names_answer_as_the_newer_ones(client: httpx.AsyncClient) -> None:
    for name in ("server_info", "model_info"):
        assert (await client.get(f"/get_{name}")).json() == (await client.get(f"/{name}")).json()


async def test_loads_say_the_same_in_both_words(client: httpx.AsyncClient) -> None:
    [short] = (await client.get("/get_load")).json()
    assert (short["dp_rank"], short["num_reqs"], short["num_waiting_reqs"], short["num_tokens"]) == (0, 0, 0, 512)
    answer = (await client.get("/v1/loads", params={"include": "core,disagg,queues,memory"})).json()
    [load] = answer["loads"]
    assert answer["dp_rank_count"] == 1
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (0, 0, 0)
    assert (load["num_used_tokens"], load["max_total_num_tokens"], load["token_usage"]) == (512, 2048, 0.25)
    assert load["max_running_requests"] == short["max_running_requests"] == 8


async def test_there_is_no_version_route(client: httpx.AsyncClient) -> None:
    """``smg`` takes a worker that has one for vLLM, and sends it no rooms."""
    assert (await client.get("/version")).status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_flushing_forgets_what_is_kept_of_prompts(tokenizer: Tokenizer, role: str, method: str) -> None:
    backend = FakeBackend(tokenizer, role=role)
    async with client_of(backend) as client:
        for n_pages in (3, 0):
            answer = await client.request(method, "/flush_cache")
            assert (answer.status_code, answer.text) == (200, f"Cache flushed.\n{n_pages} pages are forgotten.\n")
            assert answer.headers["content-type"].startswith("text/plain")


async def test_vllms_name_for_it_answers_without_a_body(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await client.get("/reset_prefix_cache")).status_code == 405
    assert backend.n_cached_pages == 3
    answer = await client.post("/reset_prefix_cache", params={"reset_external": "true"})
    assert (answer.status_code, answer.content, backend.n_cached_pages) == (200, b"", 0)


async def test_flushing_wants_the_key(backend: FakeBackend) -> None:
    async with client_of(backend, api_key="sk-1234567890") as client:
        for path in ("/flush_cache", "/reset_prefix_cache"):
            error_of(await client.post(path), 401)
    assert backend.n_cached_pages == 3


async def test_health_generate_generates_one_token_for_all_who_ask_at_once(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script.waiting = {0}
    asked = [asyncio.create_task(client.get("/health_generate")) for _ in range(3)]
    await until_async(lambda: backend.generations)
    backend.script.waiting.clear()
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3
    [request] = backend.requests
    assert (request.sampling.max_tokens, request.routed) == (1, None)
    assert (await client.get("/health_generate")).json()["role"] == "decode"
    assert len(backend.requests) == 2
    assert backend.all_over()


async def test_health_generate_says_why_nothing_is_generated(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.script.refuse = RequestFailed(Failure("no_prefill", "no prefill node answers"))
    assert error_of(await client.get("/health_generate"), 503)["message"] == "no prefill node answers"
    backend.script.refuse = None
    backend.script.waiting = {0}
    monkeypatch.setattr(router_info, "HEALTH_GENERATE_S", 0.05)
    assert "within 0.05 s" in error_of(await client.get("/health_generate"), 503)["message"]
    assert backend.all_over()


async def test_health_generate_of_a_prefill_node_is_its_readiness(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, role="prefill")
    async with client_of(backend) as client:
        assert (await client.get("/health_generate")).json()["reason"] == "probe answered"
        backend.readiness = (False, "the pools are gone")
        assert error_of(await client.get("/health_generate"), 503)["message"] == "the pools are gone"
    assert not backend.generations
