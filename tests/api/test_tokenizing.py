"""Prompts are bounded before they are tokenized, and a long one stands in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import wait
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from server.api import create_app
from server.api.lanes import Lane, LaneLimits, Lanes
from server.api.tokenizing import INLINE_CHARS, THREAD_CHARS
from server.engine.tokenizer import Tokenizer
from server.engine.tokenizer_process import EncodingJob, TokenizerProcess
from tests.api.fakes import FakeBackend
from tests.api.harness import COMPLETIONS, WITHIN_S, chat, client_of, complete, error_of, until_async
from tests.support.byte_bpe import write_tokenizer_dir
from tests.support.chat import chat_ids
from tests.support.raw_http import RawConnection, post_json

SHORT, MIDDLE, LONG = "How many?", "Tom has 12 " * 1000, "Tom has 12 " * 8000


class WatchedProcess(TokenizerProcess):
    """``started`` is set when it is ready, ``begun`` when it is to have a text."""

    def __init__(self, settings: str) -> None:
        super().__init__(settings)
        self.started, self.begun = threading.Event(), threading.Event()

    def start(self) -> None:
        super().start()
        self.started.set()

    def encode(self, job: EncodingJob) -> list[list[int]]:
        if job.texts:
            self.begun.set()
        return super().encode(job)


class Watched(Tokenizer):
    """Says what it was asked to tokenize or render, and hands out one process."""

    def watch(self, settings: str) -> None:
        self.seen: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.encoder = WatchedProcess(settings)

    def encode(self, text: str) -> list[int]:
        self.seen.append(text)
        assert self.gate.wait(WITHIN_S)
        return super().encode(text)

    def render_chat(self, messages: Any, variables: Any, **options: Any) -> str:
        self.seen.append(messages)
        return super().render_chat(messages, variables, **options)

    def process(self) -> TokenizerProcess:
        return self.encoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_dir(tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def tokenizer(directory: Path) -> Iterator[Watched]:
    tokenizer = Watched.load(directory)
    assert isinstance(tokenizer, Watched)
    tokenizer.watch((directory / "tokenizer.json").read_text())
    yield tokenizer
    tokenizer.gate.set()
    tokenizer.encoder.close()


@pytest.fixture
def backend(tokenizer: Watched) -> FakeBackend:
    backend = FakeBackend(tokenizer)
    backend.max_context = 1_000_000
    return backend


@pytest.fixture
def app(backend: FakeBackend, registry: CollectorRegistry) -> FastAPI:
    return create_app(backend, registry)


@pytest.fixture
async def stuck(tokenizer: Watched) -> int:
    """The process for long texts stands still."""
    await asyncio.get_running_loop().run_in_executor(None, tokenizer.encoder.start)
    pid = tokenizer.encoder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("n_chars", [INLINE_CHARS // 2, INLINE_CHARS * 2, THREAD_CHARS * 2])
async def test_ids_are_the_same_in_every_lane(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Watched, n_chars: int
) -> None:
    text = ("Tom has 12 äpfel 🦊" * n_chars)[:n_chars]
    assert (await complete(client, prompt=text, max_tokens=1)).status_code == 200
    messages = [{"role": "user", "content": text}]
    assert (await chat(client, messages=messages, max_tokens=1)).status_code == 200
    assert backend.requests[0].prompt_ids == tuple(tokenizer.encode(text))
    assert backend.requests[1].prompt_ids == tuple(chat_ids(tokenizer, messages))


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Watched
) -> None:
    backend.max_context = 256
    assert tokenizer.chars_per_token is not None
    most = 255 * tokenizer.chars_per_token
    for prompt in ("a" * (most + 1), ["x", "a" * (most + 1)]):
        error = error_of(await complete(client, prompt=prompt), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"{most + 1} characters" in error["message"]
        assert "256 tokens" in error["message"]
    assert tokenizer.seen == []
    error = error_of(await chat(client, messages=[{"role": "user", "content": "a" * most}]), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    longest = max((tokenizer.token_text(i) for i in range(tokenizer.vocab_size)), key=len)
    assert (await complete(client, prompt=longest * 254, max_tokens=1)).status_code == 200


async def test_without_a_bound_there_is_a_limit_of_characters(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Watched
) -> None:
    backend.max_context = 256
    tokenizer.chars_per_token = None
    assert (await complete(client, prompt=" " * 255 * 64)).status_code == 400  # many tokens, but within the limit
    assert len(tokenizer.seen) == 1
    error = error_of(await complete(client, prompt=" " * (255 * 64 + 1)), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at most 64" in error["message"]
    assert len(tokenizer.seen) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 257},
        {"prompt": ["a"] * 3, "n": 128},
        {"prompt": ["a", "b"], "stop_token_ids": [99_999]},
        {"prompt": ["a", "b"], "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": [1, 2, 3]},
        {"prompt": ["a", [5]]},
        {"prompt": ["a", "b"], "model": "another"},
    ],
)
async def test_what_is_wrong_is_found_before_a_prompt_is_tokenized(
    client: httpx.AsyncClient, tokenizer: Watched, body: dict[str, Any]
) -> None:
    assert (await client.post(COMPLETIONS, json=body)).status_code in (400, 404)
    assert tokenizer.seen == []


async def test_a_prefill_node_tokenizes_nothing_without_a_room(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Watched
) -> None:
    backend.role = "prefill"
    for asked in (
        complete(client, prompt=[SHORT, MIDDLE]),
        chat(client),
        complete(client, prompt=[5, -1]),  # ids are not looked at
    ):
        assert error_of(await asked, 400)["code"] == "wrong_role"
    assert tokenizer.seen == []


async def test_a_long_text_stands_in_nobodys_way(client: httpx.AsyncClient, tokenizer: Watched, stuck: int) -> None:
    long = [asyncio.create_task(complete(client, prompt=LONG, max_tokens=1)) for _ in range(12)]
    await until_async(tokenizer.encoder.begun.is_set)
    for prompt in (SHORT, MIDDLE, [5, 6, 7], [5] * 10_000):
        async with asyncio.timeout(WITHIN_S):
            assert (await complete(client, prompt=prompt)).status_code == 200
    async with asyncio.timeout(WITHIN_S):
        conversation = [{"role": "user", "content": MIDDLE}] * 4
        assert (await chat(client, messages=conversation)).status_code == 200
    assert not any(task.done() for task in long)
    os.kill(stuck, signal.SIGCONT)
    assert [task.status_code for task in await asyncio.gather(*long)] == [200] * 12


def long_texts(max_waiting: int = 2, run_s: float = WITHIN_S) -> Lanes:
    return Lanes(long_texts=Lane("tokenize long", LaneLimits(max_waiting, run_s=run_s)))


async def test_more_long_texts_than_may_wait_are_a_503(backend: FakeBackend, stuck: int) -> None:
    async with client_of(backend, lanes=long_texts()) as client:
        tasks = [asyncio.create_task(complete(client, prompt=LONG, max_tokens=1)) for _ in range(5)]
        await until_async(lambda: sum(task.done() for task in tasks) == 2)
        for task in tasks:
            if task.done():
                assert error_of(task.result(), 503)["code"] == "overloaded"
                assert int(task.result().headers["retry-after"]) > 0
        os.kill(stuck, signal.SIGCONT)
        assert sorted(task.status_code for task in await asyncio.gather(*tasks)) == [200, 200, 200, 503, 503]


async def test_a_text_that_takes_too_long_is_a_504_and_its_process_ends(backend: FakeBackend, stuck: int) -> None:
    async with client_of(backend, lanes=long_texts(run_s=0.1)) as client:
        error = error_of(await complete(client, prompt=LONG), 504)
    assert error["code"] == "deadline"
    assert "tokenize long" in error["message"]
    await until_async(lambda: not is_running(stuck))


async def test_a_process_that_dies_fails_its_own_text_only(
    client: httpx.AsyncClient, tokenizer: Watched, stuck: int
) -> None:
    task = asyncio.create_task(complete(client, prompt=LONG, max_tokens=1))
    await until_async(tokenizer.encoder.begun.is_set)
    other = asyncio.create_task(complete(client, prompt=LONG + "x", max_tokens=1))
    os.kill(stuck, signal.SIGKILL)
    assert error_of(await task, 503)["code"] == "tokenizer_died"
    assert (await other).status_code == 200


def test_a_client_that_goes_away_ends_the_work(server_url: str, tokenizer: Watched, backend: FakeBackend) -> None:
    assert tokenizer.encoder.started.wait(WITHIN_S)
    pid = tokenizer.encoder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    while is_running(pid):  # a client that leaves before the process has its text has nothing to end
        tokenizer.encoder.begun.clear()
        with RawConnection(server_url) as connection:
            connection.send(post_json(COMPLETIONS, {"prompt": LONG}))
            assert tokenizer.encoder.begun.wait(WITHIN_S)
        with contextlib.suppress(TimeoutError):
            wait.until(lambda: not is_running(pid), 2, "the process ends")
    assert backend.generations == []
    answer = httpx.post(f"{server_url}{COMPLETIONS}", json={"prompt": LONG, "max_tokens": 1}, timeout=WITHIN_S)
    assert answer.status_code == 200


@pytest.mark.parametrize("n_words", [1, 2000, 20_000])
async def test_a_templated_prompt_gets_no_second_bos_in_any_lane(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Watched, n_words: int
) -> None:
    text = "Tom has 12 " * n_words
    assert (await complete(client, prompt=["<bos>" + text, text], max_tokens=1)).status_code == 200
    assert backend.requests[0].prompt_ids == backend.requests[1].prompt_ids
    assert backend.requests[0].prompt_ids[:2].count(0) == 1


async def test_echo_of_many_ids_is_their_text(client: httpx.AsyncClient, tokenizer: Watched) -> None:
    ids = tokenizer.encode("Tom has 12 äpfel 🦊\n" * 2000)
    answer = await complete(client, prompt=[ids, [5, 6]], echo=True, max_tokens=1)
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts[0].startswith(tokenizer.decode(ids))
    assert texts[1].startswith(tokenizer.decode([5, 6]))


@pytest.mark.parametrize("at", [0, 9_999])
@pytest.mark.parametrize(
    ("wrong", "words"), [("a", "not an integer"), (True, "not an integer"), (-1, "-1"), (400, "400")]
)
async def test_one_wrong_id_among_many_is_named(client: httpx.AsyncClient, at: int, wrong: Any, words: str) -> None:
    prompt: list[Any] = [[5] * 10_000, [5] * 10_000]
    prompt[1][at] = wrong
    error = error_of(await complete(client, prompt=prompt), 400)
    assert error["param"] == "prompt"
    assert words in error["message"]
