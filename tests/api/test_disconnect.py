"""A client that goes away is an abort, in every phase, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import httpx
import pytest
from prometheus_client import CollectorRegistry

from server.api import create_app
from server.api.generations import Generations
from server.api.lanes import Lane, LaneLimits, Lanes
from server.engine.request import GenerationRequest
from tests.api.fakes import FakeBackend
from tests.api.harness import COMPLETIONS, JSON, WITHIN_S, until
from tests.support.http import http_server_thread
from tests.support.raw_http import RawConnection, post_json

T = TypeVar("T")


def post_and_leave(url: str, backend: FakeBackend, *, n: int = 1, **body: object) -> None:
    """Goes away as soon as the server has begun."""
    n_before = len(backend.generations)
    with RawConnection(url) as connection:
        connection.send(post_json(COMPLETIONS, {"prompt": "x", "n": n, **body}))
        until(lambda: len(backend.generations) == n_before + n)


@pytest.mark.parametrize("stream", [False, True])
def test_while_the_prompt_is_computed(server_url: str, backend: FakeBackend, stream: bool) -> None:
    backend.script.waiting = {0, 1}
    post_and_leave(server_url, backend, stream=stream, n=2)
    until(lambda: all(g.aborted for g in backend.generations))


def test_while_a_whole_answer_is_generated(server_url: str, backend: FakeBackend) -> None:
    backend.script.hang_after = 2
    post_and_leave(server_url, backend, n=2)
    until(lambda: all(g.aborted for g in backend.generations))
    backend.script.hang_after = None
    assert httpx.post(f"{server_url}{COMPLETIONS}", json={"prompt": "x"}).status_code == 200, "the server goes on"
    assert not backend.generations[-1].aborted, "it came to its end by itself"


def test_in_a_stream_even_if_no_token_comes(server_url: str, backend: FakeBackend) -> None:
    backend.script.hang_after = 2
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{server_url}{COMPLETIONS}", json=body, timeout=WITHIN_S) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-pd-prefill"] == "10.0.0.1:8998"
        next(answer.iter_lines())
    until(lambda: backend.generations[0].aborted)


async def test_reader_that_stops_early_leaves_nothing_running(backend: FakeBackend) -> None:
    generations = Generations(backend, [GenerationRequest(str(i), (5, 6)) for i in range(3)])
    assert await generations.wait()
    assert generations.take() is not None
    generations.abort()
    generations.abort()
    assert all(generation.aborted for generation in backend.generations)


class SlowLane(Lane):
    """Its calls begin, and go on when they may."""

    def __init__(self) -> None:
        super().__init__("slow", LaneLimits(max_waiting=8))
        self.n_begun, self.may_go_on = 0, threading.Event()

    async def run(
        self,
        size: int,
        function: Callable[[], T],
        give_up: Callable[[], None] | None = None,
        *,
        client: str | None = None,
    ) -> T:
        def slowly() -> T:
            self.n_begun += 1
            assert self.may_go_on.wait(WITHIN_S)
            return function()

        return await super().run(size, slowly, give_up, client=client)


def test_while_a_large_body_waits_to_be_read(backend: FakeBackend, registry: CollectorRegistry) -> None:
    lane = SlowLane()
    app = create_app(backend, registry, lanes=Lanes(bodies=lane))
    sent = post_json(COMPLETIONS, {"prompt": "x" * 50_000})
    left = {"route": COMPLETIONS, "status": "499"}
    with http_server_thread(app, registry) as url:
        try:
            with RawConnection(url) as first:
                first.send(sent)
                until(lambda: lane.n_begun == 1)
                for _ in range(3):
                    with RawConnection(url) as waits:
                        waits.send(sent)
                until(lambda: registry.get_sample_value("pd_http_responses_total", left) == 3)
        finally:
            lane.may_go_on.set()
        answer = httpx.post(f"{url}{COMPLETIONS}", content=sent.partition(b"\r\n\r\n")[2], headers=JSON)
    assert answer.status_code == 400, "too long, and read"
    assert lane.n_begun == 2
