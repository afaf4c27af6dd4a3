"""A client that goes away is an abort, in every phase, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client import CollectorRegistry

from server.api import bodies
from server.api.generations import Generations
from server.engine.request import GenerationRequest
from tests.api.fakes import FakeBackend

ABORT_WITHIN_S = 20.0


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + ABORT_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def post_and_leave(url: str, backend: FakeBackend, *, n: int = 1, **body: object) -> None:
    """Goes away as soon as the server has begun."""
    n_before = len(backend.generations)
    content = json.dumps({"prompt": "x", "n": n, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        assert wait_for(lambda: len(backend.generations) == n_before + n)


@pytest.mark.parametrize("stream", [False, True])
def test_while_the_prompt_is_computed(server_url: str, backend: FakeBackend, stream: bool) -> None:
    backend.script.route_hangs = True
    post_and_leave(server_url, backend, stream=stream, n=2)
    assert wait_for(lambda: len(backend.generations) == 2 and all(g.aborted for g in backend.generations))


def test_while_a_whole_answer_is_generated(server_url: str, backend: FakeBackend) -> None:
    backend.script.hang_after = 2
    post_and_leave(server_url, backend, n=2)
    assert wait_for(lambda: all(g.aborted for g in backend.generations))


def test_in_a_stream_even_if_no_token_comes(server_url: str, backend: FakeBackend) -> None:
    backend.script.hang_after = 2
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{server_url}/v1/completions", json=body, timeout=20) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-pd-prefill"] == "10.0.0.1:8998"
        next(answer.iter_lines())
    assert wait_for(lambda: backend.generations[0].aborted)


def test_server_goes_on_afterwards(server_url: str, backend: FakeBackend) -> None:
    backend.script.hang_after = 2
    post_and_leave(server_url, backend)
    backend.script.hang_after = None
    assert httpx.post(f"{server_url}/v1/completions", json={"prompt": "x"}).status_code == 200
    assert not backend.generations[-1].aborted  # it came to its end by itself


def test_http2_preface_is_refused_at_once(server_url: str) -> None:
    host, port = server_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        connection.settimeout(20)
        assert connection.recv(100)[:10] in (b"HTTP/1.1 4", b"")


async def test_reader_that_stops_early_leaves_nothing_running(backend: FakeBackend) -> None:
    generations = Generations(backend, [GenerationRequest(str(i), (5, 6)) for i in range(3)])
    outputs = generations.outputs()
    await anext(outputs)
    await outputs.aclose()
    generations.abort()
    generations.abort()
    assert all(generation.aborted for generation in backend.generations)


def test_while_a_large_body_waits_to_be_read(
    server_url: str, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_go_on = [], threading.Event()

    def parse_slowly(body: bytes, _max_values: int) -> object:
        read.append(body)
        assert may_go_on.wait(ABORT_WITHIN_S)
        return json.loads(body)

    def left() -> float:
        labels = {"route": "/v1/completions", "status": "499"}
        return registry.get_sample_value("pd_http_responses_total", labels) or 0.0

    monkeypatch.setattr(bodies, "parse_json", parse_slowly)
    content = json.dumps({"prompt": "x" * 50_000}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    host, port = server_url.removeprefix("http://").split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=20) as first:
            first.sendall(head.encode() + b"\r\n\r\n" + content)
            assert wait_for(lambda: len(read) == 1)
            for _ in range(3):
                with socket.create_connection((host, int(port)), timeout=20) as waits:
                    waits.sendall(head.encode() + b"\r\n\r\n" + content)
            assert wait_for(lambda: left() == 3), "each has left the queue"
    finally:
        may_go_on.set()
    answer = httpx.post(f"{server_url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, "too long, and read"
    assert len(read) == 2
