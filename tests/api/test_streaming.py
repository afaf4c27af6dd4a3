"""When a stream's head goes out, and what keeps it alive, over real sockets. Tests let prompts go, no clock does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from server.api.direct_body import DirectBody
from server.api.http_limits import HttpLimits
from server.api.http_protocol import LimitedHttpProtocol
from server.api.streaming import StreamTimes
from server.failure import Failure, RequestFailed
from tests.api.fakes import ANSWER, FakeBackend
from tests.api.harness import CHAT, COMPLETIONS, MINIMAL, RESPONSES, WITHIN_S, until
from tests.support.http import http_server_thread
from tests.support.raw_http import RawConnection, post_json

PATIENT = StreamTimes(head_s=60.0, comment_s=60.0)
HASTY = StreamTimes(head_s=0.05, comment_s=0.05)
COMMENT = ": waiting"
LATE = RequestFailed(Failure("deadline", "late"))

patient = pytest.mark.parametrize("stream_times", [PATIENT], ids=["patient"])
hasty = pytest.mark.parametrize("stream_times", [HASTY], ids=["hasty"])


class Stream:
    """An answer as it comes."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def line(self) -> str:
        """The next line that is not empty."""
        return next(line for line in self._lines if line)

    def rest(self) -> list[Any]:
        """The events up to the end, without comments."""
        lines = [line.removeprefix("data: ") for line in self._lines if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def streamed(url: str, path: str = COMPLETIONS, **body: Any) -> Iterator[Stream]:
    with httpx.stream(
        "POST", f"{url}{path}", json={"stream": True, **MINIMAL[path], **body}, timeout=WITHIN_S
    ) as response:
        yield Stream(response)


def texts(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@patient
def test_a_sample_streams_while_others_wait(server_url: str, backend: FakeBackend) -> None:
    backend.script.waiting = {1, 2}
    with streamed(server_url, n=3) as stream:
        assert stream.response.status_code == 200
        assert not [name for name in stream.response.headers if name.startswith("x-pd-")], "not all of it is known"
        begun: list[Any] = []
        while not begun or begun[-1]["choices"][0]["finish_reason"] is None:
            begun.append(json.loads(stream.line().removeprefix("data: ")))
        assert texts(begun) == {0: ANSWER}
        assert not any("pd" in chunk for chunk in begun)
        backend.script.waiting.clear()
        rest = stream.rest()
    assert texts(rest[:-1]) == {1: ANSWER, 2: ANSWER}
    room = backend.first_room or 0
    assert [chunk["pd"] for chunk in rest[:-1] if "pd" in chunk] == [rest[-2]["pd"]]
    assert rest[-2]["id"] == f"cmpl-{rest[-2]['pd'].pop('request_id')}"
    assert rest[-2]["pd"] == {"prefill": "10.0.0.1:8998", "room": f"{room},{room + 1},{room + 2}"}


@hasty
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_that_waits_sends_comments_and_tells_the_rest_at_its_end(
    server_url: str, backend: FakeBackend, path: str, usage: bool
) -> None:
    backend.script.waiting, backend.script.n_retries = {0}, 1
    with streamed(server_url, path, **({"stream_options": {"include_usage": True}} if usage else {})) as stream:
        assert stream.response.status_code == 200
        assert "x-pd-prefill" not in stream.response.headers
        assert [stream.line() for _ in range(4)] == [COMMENT] * 4
        backend.script.waiting.clear()
        *chunks, done = stream.rest()
    assert done == "[DONE]"
    assert chunks[-1]["id"].endswith(chunks[-1]["pd"].pop("request_id"))
    assert chunks[-1]["pd"] == {"prefill": "10.0.0.1:8998", "room": str(backend.first_room), "retries": "1"}
    assert (chunks[-1]["choices"] == []) == usage
    assert not any("pd" in chunk for chunk in chunks[:-1])


@hasty
def test_a_stream_of_responses_that_waits_does_so_too(server_url: str, backend: FakeBackend) -> None:
    backend.script.waiting, backend.script.n_retries = {0}, 1
    with streamed(server_url, RESPONSES) as stream:
        assert [stream.line() for _ in range(4)] == [COMMENT] * 4
        backend.script.waiting.clear()
        *others, last = stream.rest()
    assert last["type"] == "response.completed"
    assert last["response"]["id"].endswith(last["response"]["pd"].pop("request_id"))
    assert last["response"]["pd"] == {"prefill": "10.0.0.1:8998", "room": str(backend.first_room), "retries": "1"}
    assert not any("pd" in event.get("response", {}) for event in others)


@patient
def test_headers_that_are_known_are_in_the_head_and_in_the_last_chunk(server_url: str, backend: FakeBackend) -> None:
    with streamed(server_url) as stream:
        assert stream.response.headers["x-pd-prefill"] == "10.0.0.1:8998"
        assert stream.rest()[-2]["pd"]["prefill"] == "10.0.0.1:8998"


@patient
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_before_the_head_has_its_status(server_url: str, backend: FakeBackend, n: int) -> None:
    backend.script.waiting, backend.script.failing = set(range(n)), {n - 1: LATE}
    threading.Timer(0.1, lambda: backend.script.waiting.discard(n - 1)).start()
    with streamed(server_url, n=n) as stream:
        assert stream.response.status_code == 504
        assert json.loads(stream.response.read())["error"]["code"] == "deadline"
    until(backend.all_over)


@hasty
def test_a_failure_behind_the_head_is_an_event(server_url: str, backend: FakeBackend) -> None:
    backend.script.waiting, backend.script.failing = {0, 1}, {1: LATE}
    with streamed(server_url, n=2) as stream:
        assert stream.line() == COMMENT
        backend.script.waiting = {0}
        (event,) = stream.rest()
    assert event["error"]["code"] == "deadline"
    until(backend.all_over)


@patient
def test_a_failure_of_one_sample_ends_the_stream_of_the_others(server_url: str, backend: FakeBackend) -> None:
    backend.script.waiting, backend.script.failing, backend.script.hang_after = {1, 2}, {2: LATE}, 3
    with streamed(server_url, n=3) as stream:
        assert json.loads(stream.line().removeprefix("data: "))["choices"][0]["index"] == 0
        backend.script.waiting = {1}
        *chunks, event = stream.rest()
    assert event["error"]["code"] == "deadline"
    assert set(texts(chunks)) <= {0}
    until(backend.all_over)


@patient
def test_a_failure_of_one_sample_is_known_while_the_prompt_of_another_waits(
    server_url: str, backend: FakeBackend
) -> None:
    """Of a whole answer too."""
    backend.script.waiting, backend.script.fail_after, backend.script.failure = {1}, 2, LATE
    answer = httpx.post(f"{server_url}/v1/completions", json={"prompt": "x", "n": 2}, timeout=WITHIN_S)
    assert answer.status_code == 504
    until(backend.all_over)


@hasty
def test_a_prefill_nodes_stream_ends_when_its_head_has_to_go_out(server_url: str, backend: FakeBackend) -> None:
    """Routers read it to its end before they relay the decode node's first byte. The rooms go on."""
    backend.role = "prefill"
    backend.script.waiting = {1}
    with streamed(server_url, bootstrap_room=5, n=2) as stream:
        assert stream.response.status_code == 200
        *chunks, done = stream.rest()
    assert done == "[DONE]"
    assert texts(chunks) in ({0: "To", 1: ""}, {0: "", 1: ""})
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length", "length"]
    assert not any(generation.aborted for generation in backend.generations)


@patient
def test_a_prefill_node_says_by_status_what_fails_before(server_url: str, backend: FakeBackend) -> None:
    backend.role = "prefill"
    backend.script.waiting, backend.script.failing = {0}, {0: LATE}
    threading.Timer(0.1, backend.script.waiting.clear).start()
    with streamed(server_url, bootstrap_room=5) as stream:
        assert stream.response.status_code == 504
    until(backend.all_over)
    with streamed(server_url, bootstrap_room=5) as stream:
        assert texts(stream.rest()[:-1])[0] != ""


@pytest.mark.parametrize("stream_times", [StreamTimes(head_s=60.0, comment_s=0.1)], ids=["comments"])
def test_text_that_is_held_back_for_long_is_no_silence(server_url: str, backend: FakeBackend) -> None:
    backend.script.answer, backend.script.step_s = "a" * 30, 0.02
    with streamed(server_url, stop="a" * 30 + "b") as stream:
        assert stream.line() == COMMENT
        assert texts(stream.rest()[:-1]) == {0: "a" * 30}


@hasty
def test_openais_client_skips_comments(server_url: str, backend: FakeBackend) -> None:
    backend.script.waiting = {0}
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S) as client:
        stream = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
        threading.Timer(10 * HASTY.comment_s, backend.script.waiting.clear).start()
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["pd"]["prefill"] == "10.0.0.1:8998"


@hasty
def test_a_client_that_leaves_while_its_prompt_waits_ends_it(server_url: str, backend: FakeBackend) -> None:
    backend.script.waiting = {0, 1}
    with streamed(server_url, n=2) as stream:
        assert stream.line() == COMMENT
    until(backend.all_over)


def test_a_client_that_does_not_read_its_stream_ends_it(
    app: FastAPI, registry: CollectorRegistry, backend: FakeBackend
) -> None:
    """What it does not read would wait here, for every such client."""
    backend.max_context, backend.script.answer = 10**6, "Tom has 42 " * 20_000
    with (
        http_server_thread(app, registry, HttpLimits(write_timeout_s=0.2)) as url,
        RawConnection(url, receive_nbytes=4096) as connection,
    ):
        connection.send(post_json(COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 900_000}))
        until(lambda: backend.generations)
        until(backend.all_over)
        assert backend.generations[0].aborted, "and not because it was read to its end"


def test_a_client_that_stops_after_it_has_read_a_part_ends_its_stream(
    app: FastAPI, registry: CollectorRegistry, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits fills the connection again at once, in the call that says that it has room."""
    backend.max_context, backend.script.answer, backend.script.tokens_a_step = 10**6, "Tom has 42 " * 40_000, 4
    has_room, has_stopped = threading.Event(), threading.Event()
    full_again: list[bool] = []
    resume = LimitedHttpProtocol.resume_writing

    def noted(protocol: LimitedHttpProtocol) -> None:
        protocol._limits = replace(protocol._limits, write_timeout_s=0.1)  # noqa: SLF001
        has_room.set()
        assert has_stopped.wait(WITHIN_S), "else the client could keep pace with what is written now"
        resume(protocol)
        full_again.append(protocol.flow.write_paused)

    monkeypatch.setattr(LimitedHttpProtocol, "resume_writing", noted)
    with http_server_thread(app, registry) as url, RawConnection(url, receive_nbytes=4096) as connection:
        connection.send(post_json(COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 900_000}))
        until(lambda: backend.generations and backend.generations[0].ended)
        connection.socket.settimeout(0.05)
        while not has_room.is_set():
            with suppress(TimeoutError):
                connection.socket.recv(1 << 16)
        has_stopped.set()
        until(lambda: registry.get_sample_value("pd_http_refused_total", {"reason": "write_timeout"}) == 1)
    assert full_again[0]


def test_what_a_client_is_slow_to_read_waits_in_few_bytes(
    server_url: str, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the answer is not even spelled before there is room; then it comes whole and in its order."""
    backend.max_context, backend.script.answer = 10**6, "Tom has 42 " * 9_000
    held: list[int] = []
    write = DirectBody.write

    def noted(body: DirectBody, pieces: Sequence[bytes]) -> None:
        write(body, pieces)
        held.append(body._transport.get_write_buffer_size())  # noqa: SLF001

    monkeypatch.setattr(DirectBody, "write", noted)
    with RawConnection(server_url, receive_nbytes=4096) as connection:
        connection.send(post_json(COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 900_000}))
        until(lambda: backend.generations and backend.generations[0].ended)
        answer = connection.answer()
    chunks = [line.removeprefix("data: ") for line in answer.content.decode().split("\n\n") if line]
    assert chunks[-1] == "[DONE]"
    assert texts([json.loads(chunk) for chunk in chunks[:-1]]) == {0: backend.script.answer}
    assert 0 < max(held) < 100_000, "the transport's limit, and the write that reached it"
