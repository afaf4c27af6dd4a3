"""What one HTTP client may cost: every limit, over real sockets, with small limits so that small inputs reach them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from server.api import create_app
from server.api.http_connections import Body, ConnectionManager
from server.api.http_limits import SMALL_BODY_NBYTES, HttpLimits, Refusal
from server.api.http_protocol import LimitedHttpProtocol
from server.engine.tokenizer import Tokenizer
from server.threads import call_in_thread
from tests.api.fakes import FakeBackend
from tests.api.harness import until
from tests.support.http import http_server, http_server_thread
from tests.support.raw_http import ANSWERED_WITHIN_S, Echo, RawConnection, chunk, head, post, post_json

SMALL = HttpLimits(max_head_nbytes=2000, max_headers=20, max_url_nbytes=200, max_body_nbytes=10_000)
KEY = "sk-1234567890"
CHUNKED = head("POST", "/v1/completions", Transfer_Encoding="chunked", Content_Type="application/json")
SOON_S = 0.2
"""A limit of time that tests wait for."""
PAST_S = 0.7
"""Longer than that limit and the grace at its end."""


@dataclass
class Served:
    """An app behind limits. It counts from :meth:`begin` on."""

    url: str
    registry: CollectorRegistry
    echo: Echo = field(default_factory=Echo)
    counted_before: dict[tuple[str, ...], float] = field(default_factory=dict)

    def begin(self) -> Served:
        """For another test: nothing is left of the one before."""
        self.echo.begin()
        until(lambda: self.gauge("pd_http_connections") == self.gauge("pd_http_held_body_bytes") == 0)
        self.counted_before = self._counts()
        return self

    def connect(self) -> RawConnection:
        return RawConnection(self.url)

    def n_refused(self, reason: str) -> float:
        return self._n_new("pd_http_refused_total", reason)

    def n_responses(self, status: int) -> float:
        """To requests that no route has seen."""
        return self._n_new("pd_http_responses_total", "other", str(status))

    def gauge(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)

    def _n_new(self, *counter: str) -> float:
        return self._counts().get(counter, 0.0) - self.counted_before.get(counter, 0.0)

    def _counts(self) -> dict[tuple[str, ...], float]:
        """By name and labels."""
        samples = (sample for metric in self.registry.collect() for sample in metric.samples)
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    def wait_until_held(self, nbytes: int) -> None:
        until(lambda: self.gauge("pd_http_held_body_bytes") == nbytes)


Serve = Callable[[HttpLimits], Served]


@pytest.fixture(scope="module")
def served() -> Iterator[Serve]:
    """Gives an :class:`Echo` behind these limits. Servers are kept for later tests: each takes its time to end."""
    kept: dict[HttpLimits, Served] = {}
    with contextlib.ExitStack() as stack:

        def server_of(limits: HttpLimits) -> Served:
            if limits not in kept:
                kept[limits] = stack.enter_context(serving(Echo(), limits))
            return kept[limits].begin()

        yield server_of
        for node in kept.values():
            node.echo.go_on.set()


@contextlib.contextmanager
def serving(app: ASGIApp, limits: HttpLimits, registry: CollectorRegistry | None = None) -> Iterator[Served]:
    registry = registry or CollectorRegistry()
    with http_server_thread(app, registry, limits) as url:
        yield Served(url, registry, app if isinstance(app, Echo) else Echo())


@pytest.fixture(scope="module")
def keyed_node(tokenizer: Tokenizer) -> Iterator[tuple[Served, FakeBackend]]:
    registry, backend = CollectorRegistry(), FakeBackend(tokenizer)
    with serving(create_app(backend, registry, api_key=KEY), SMALL, registry) as node:
        yield node, backend


@pytest.fixture
def keyed(keyed_node: tuple[Served, FakeBackend]) -> Iterator[Served]:
    """A node's app that wants an API key, behind small limits. Nothing gets as far as its backend."""
    node, backend = keyed_node
    yield node.begin()
    assert backend.requests == []


HEADERS = [b"a%d: b\r\n" % i for i in range(30)]
TOO_MUCH = [
    (b"GET /health HTTP/1.1\r\n" + b"".join(HEADERS), 431, "headers_too_large"),
    (b"GET /health HTTP/1.1\r\n" + b"".join(HEADERS) + b"\r\n", 431, "headers_too_large"),
    (b"GET /health HTTP/1.1\r\na: " + b"b" * 2001 + b"\r\n\r\n", 431, "headers_too_large"),
    (b"GET /health HTTP/1.1\r\na: " + b"b" * 2001, 431, "headers_too_large"),
    (b"GET /health HTTP/1.1\r\n" + b"b" * 2001, 431, "headers_too_large"),
    (b"\r\n" * 1001, 431, "headers_too_large"),
    (head(path="/" + "a" * 200), 414, "url_too_long"),
    (b"GET /" + b"a" * 200, 414, "url_too_long"),
    (head("POST", Content_Length=10_001), 413, "body_too_large"),
    (head("POST", Content_Length=10_001, Expect="100-continue"), 413, "body_too_large"),
    (head("POST", Content_Length=10_001, Connection="Upgrade", Upgrade="h2c"), 413, "body_too_large"),
    (CHUNKED + b"1\r\na\r\n0\r\n" + b"".join(HEADERS), 431, "headers_too_large"),
    (CHUNKED + b"1\r\na\r\n0\r\na: " + b"b" * 2001 + b"\r\n\r\n", 431, "headers_too_large"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 400, "malformed_request"),
    (b"nonsense\r\n\r\n", 400, "malformed_request"),
    (b"GET  HTTP/1.1\r\n\r\n", 400, "malformed_request"),
    (head("CONNECT", "test:443"), 400, "malformed_request"),
    (head("POST", Content_Length=5, Transfer_Encoding="chunked"), 400, "malformed_request"),
]


@pytest.mark.parametrize(("sent", "status", "code"), TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_too_much_is_refused_before_the_key_is_looked_at(keyed: Served, sent: bytes, status: int, code: str) -> None:
    if CHUNKED in sent:  # else the 401 is out before the trailers come
        sent = sent.replace(b"Host: test", b"Host: test\r\nAuthorization: Bearer " + KEY.encode())
    with keyed.connect() as connection:
        answer = connection.send(sent).answer()
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["connection"] == "close"
        assert connection.is_closed()
    assert keyed.n_refused(code) == 1


def test_a_body_without_declared_length_is_cut_off(keyed: Served) -> None:
    authorized = CHUNKED.replace(b"Host: test", b"Host: test\r\nAuthorization: Bearer " + KEY.encode())
    with keyed.connect() as connection:
        answer = connection.send(authorized + chunk(b"x" * 5000) + chunk(b"x" * 5001)).answer()
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert connection.is_closed()
    until(lambda: keyed.n_responses(413) == 1)


@pytest.mark.parametrize("piece", [b"a: b\r\n", b"b" * 1000], ids=["fields", "one field"])
@pytest.mark.parametrize("where", [b"GET / HTTP/1.1\r\na: ", CHUNKED + b"0\r\na: "], ids=["headers", "trailers"])
def test_endless_headers_and_trailers_are_cut_off(served: Serve, where: bytes, piece: bytes) -> None:
    node = served(SMALL)
    with node.connect() as connection:
        connection.send(where)
        assert connection.send_until_refused(piece, 100 << 20) < 20 << 20  # what a refused client sends is read a while
        assert node.n_refused("headers_too_large") == 1


@pytest.mark.parametrize(
    ("piece", "code"),
    [
        (chunk(b"x") * 100, "chunks_too_small"),
        (b"1;" + b"e" * 1000 + b"\r\nx\r\n", "chunks_too_small"),
        (b"1" * 99, ""),
    ],
    ids=["small chunks", "long extensions", "length"],
)
def test_chunk_framing_is_limited(served: Serve, piece: bytes, code: str) -> None:
    node = served(replace(SMALL, max_body_nbytes=1 << 20))
    with node.connect() as connection:
        connection.send(CHUNKED)
        connection.send_until_refused(piece, 10 << 20)
        assert node.n_refused(code or "malformed_request") == 1


def test_a_client_that_is_still_sending_gets_the_answer(served: Serve) -> None:
    node = served(replace(SMALL, max_body_nbytes=1 << 20))
    for content in (bytes(10 << 20), iter([bytes(1 << 16)] * 160)):
        answer = httpx.post(node.url, content=content, timeout=ANSWERED_WITHIN_S)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "The body is larger than 1048576 bytes."
    assert node.echo.n_begun <= 1  # the one without a declared length


def test_a_large_body_is_a_413(app: FastAPI, registry: CollectorRegistry, backend: FakeBackend) -> None:
    with serving(app, replace(HttpLimits(), max_body_nbytes=100_000), registry) as node:
        answer = httpx.post(f"{node.url}/v1/completions", json={"prompt": "x" * 100_001}, timeout=ANSWERED_WITHIN_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert backend.requests == []


def test_a_refused_body_is_a_client_that_went_away_to_the_app(app: FastAPI, registry: CollectorRegistry) -> None:
    with serving(app, SMALL, registry) as node:
        sent = [chunk(b"x" * 6000)] * 2
        answer = httpx.post(f"{node.url}/v1/completions", content=iter(sent), timeout=ANSWERED_WITHIN_S)
        assert answer.status_code == 413
        until(lambda: node.n_responses(413) == 1)


def test_a_client_that_goes_in_the_middle_of_a_body_leaves_nothing(app: FastAPI, registry: CollectorRegistry) -> None:
    gc.collect()
    gc.disable()  # what it would come by for is here for ever
    try:
        with serving(app, HttpLimits(), registry) as node:
            with node.connect() as connection:
                connection.send(head("POST", "/v1/completions", Content_Length=100_000) + bytes(90_000))
                node.wait_until_held(90_000 - SMALL_BODY_NBYTES)
            until(lambda: node.n_responses(499) == 1)
        assert [kept for kept in gc.get_objects() if type(kept) is ClientDisconnect] == []
    finally:
        gc.enable()


async def test_of_large_bodies_one_piece_is_read_in_each_round_of_the_loop(
    backend: FakeBackend, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a small request beside them waits for one piece, not for one of each."""
    n_rounds, reads = 0, Counter[int]()
    receive = LimitedHttpProtocol.data_received

    def data_received(self: LimitedHttpProtocol, data: bytes) -> None:
        reads[n_rounds] += self._manager.is_growing(self)
        receive(self, data)

    def next_round() -> None:
        nonlocal n_rounds
        n_rounds += 1
        loop.call_soon(next_round)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(LimitedHttpProtocol, "data_received", data_received)
    big = post_json("/v1/completions", {"prompt": "a" * (3 << 20)})
    async with http_server(backend, registry) as url:
        loop.call_soon(next_round)

        def ask() -> int:
            with RawConnection(url) as connection:
                return connection.send(big).answer().status

        answers = await asyncio.gather(*(call_in_thread("client", ask) for _ in range(6)))
    assert answers == [400] * 6
    assert sum(reads.values()) > 6
    assert max(reads.values()) == 1


# Time


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: t", b"\r\n"], ids=["a letter", "headers", "blank"])
def test_a_head_must_arrive_in_time(served: Serve, sent: bytes) -> None:
    node = served(replace(SMALL, head_timeout_s=SOON_S))
    with node.connect() as connection:
        answer = connection.send(sent).answer()
        assert (answer.status, answer.error["code"]) == (408, "head_timeout")
        assert connection.is_closed()


def test_a_trickle_does_not_lengthen_the_time(served: Serve) -> None:
    node = served(replace(SMALL, head_timeout_s=SOON_S))
    with node.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.send(b"a: b\r\n" if node.n_refused("head_timeout") else b"x")
                if node.n_refused("head_timeout"):
                    break
                time.sleep(0.01)
        assert node.n_refused("head_timeout") == 1


@pytest.mark.parametrize("sent", [head("POST", Content_Length=9) + b"1234", CHUNKED + chunk(b"1234")])
def test_a_body_must_arrive_in_time(served: Serve, sent: bytes) -> None:
    node = served(replace(SMALL, body_timeout_s=SOON_S))
    with node.connect() as connection:
        answer = connection.send(sent).answer()
        assert (answer.status, answer.error["code"]) == (408, "body_timeout")
        assert connection.is_closed()


@pytest.mark.parametrize("sent", [b"", head()], ids=["silent", "after a request"])
def test_a_connection_without_a_request_is_closed(served: Serve, sent: bytes) -> None:
    node = served(replace(SMALL, keep_alive_s=SOON_S))
    with node.connect() as connection:
        if sent:
            assert connection.send(sent).answer().status == 200
        assert connection.is_closed()
        until(lambda: node.gauge("pd_http_connections") == 0)


def test_a_request_that_takes_long_is_not_cut_off(served: Serve) -> None:
    limits = replace(SMALL, head_timeout_s=SOON_S, body_timeout_s=SOON_S, keep_alive_s=SOON_S, write_timeout_s=SOON_S)
    node = served(limits)
    with node.connect() as connection:
        connection.send(head(path="/wait") + b"GET / HT")  # the next one waits for the answer as well
        time.sleep(PAST_S)
        node.echo.go_on.set()
        assert connection.answer().seen["path"] == "/wait"
        assert connection.send(b"TP/1.1\r\n\r\n").answer().seen["path"] == "/"


# Connections


def test_connections_without_a_request_give_way(served: Serve) -> None:
    node = served(replace(SMALL, max_connections=3))
    with contextlib.ExitStack() as stack:
        silent, slow, used = (stack.enter_context(node.connect()) for _ in range(3))
        until(lambda: node.gauge("pd_http_connections") == 3)
        slow.send(b"GET / HTTP/1.1\r\n")
        assert used.send(head()).answer().status == 200
        assert stack.enter_context(node.connect()).send(head()).answer().status == 200
        assert silent.is_closed()
        assert stack.enter_context(node.connect()).send(head()).answer().status == 200
        answer = slow.answer()
        assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        assert slow.is_closed()
        assert node.n_refused("too_many_connections") == 1
        assert node.gauge("pd_http_connections") == 3


def test_connections_with_a_request_do_not_give_way(served: Serve) -> None:
    node = served(replace(SMALL, max_connections=2, max_refused=3))
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(node.connect()).send(head(path="/wait")) for _ in range(2)]
        until(lambda: node.echo.n_begun == 2)
        for i in range(5):
            late = stack.enter_context(node.connect())
            answer = late.send(head()).answer()
            assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
            assert int(answer.headers["retry-after"]) > 0
            assert node.gauge("pd_http_connections") == 2 + min(i + 1, 3)
        node.echo.go_on.set()
        assert [connection.answer().status for connection in busy] == [200, 200]


# Memory of bodies

LARGE = SMALL_BODY_NBYTES + 100_000
HOLDING = HttpLimits(max_held_body_nbytes=250_000)


def test_of_too_many_large_bodies_the_slowest_is_refused(served: Serve) -> None:
    node = served(HOLDING)
    with contextlib.ExitStack() as stack:
        slow = []
        for i in range(2):
            slow.append(stack.enter_context(node.connect()))
            slow[i].send(head("POST", Content_Length=LARGE + 1) + bytes(LARGE))
            node.wait_until_held((i + 1) * 100_000)
        assert stack.enter_context(node.connect()).send(post(bytes(SMALL_BODY_NBYTES))).answer().status == 200
        quick = stack.enter_context(node.connect())
        assert quick.send(post(bytes(LARGE))).answer().seen["nbytes"] == LARGE
        answer = slow[0].answer()
        assert (answer.status, answer.error["code"]) == (503, "too_many_bodies")
        assert slow[1].send(b"x").answer().seen["nbytes"] == LARGE + 1
        assert node.gauge("pd_http_held_body_bytes") == 0
        assert node.n_refused("too_many_bodies") == 1


def test_a_body_counts_until_its_request_is_over(served: Serve) -> None:
    node = served(HOLDING)
    with contextlib.ExitStack() as stack:
        for i in range(2):
            body = head("POST", "/wait", Content_Length=LARGE) + bytes(LARGE)
            stack.enter_context(node.connect()).send(body)
            node.wait_until_held((i + 1) * 100_000)
        answer = stack.enter_context(node.connect()).send(post(bytes(LARGE))).answer()
        assert (answer.status, answer.error["code"]) == (503, "too_many_bodies")
        assert stack.enter_context(node.connect()).send(post(bytes(1000))).answer().status == 200
        node.echo.go_on.set()
        node.wait_until_held(0)
        assert stack.enter_context(node.connect()).send(post(bytes(LARGE))).answer().status == 200


def test_the_body_of_a_request_that_waits_behind_another_counts_from_its_first_byte(served: Serve) -> None:
    node = served(HOLDING)
    with node.connect() as connection:
        connection.send(head(path="/wait") + post(bytes(1000)))
        node.wait_until_held(1000)
        node.echo.go_on.set()
        assert [connection.answer().seen["nbytes"] for _ in range(2)] == [0, 1000]
        node.wait_until_held(0)


def test_clients_that_go_away_hold_nothing(served: Serve) -> None:
    node = served(replace(HOLDING, max_held_body_nbytes=500_000))
    with node.connect() as first, node.connect() as second:
        first.send(head("POST", Content_Length=LARGE + 1) + bytes(LARGE))
        second.send(head(path="/wait") + post(bytes(LARGE)))  # the second one never begins
        node.wait_until_held(100_000 + LARGE)
    node.echo.go_on.set()
    node.wait_until_held(0)
    until(lambda: node.gauge("pd_http_connections") == 0)


class Gone:
    """A connection whose client has just left: nothing can be told to it, and it is not closed yet."""

    def refuse(self, refusal: Refusal) -> None: ...

    def give_way(self) -> None: ...


def test_a_client_that_has_just_left_does_not_hold_up_those_that_stay() -> None:
    manager = ConnectionManager(HttpLimits(max_held_body_nbytes=1 << 20), CollectorRegistry())
    gone, stays = Gone(), Gone()
    bodies = Body(nbytes=1 << 20), Body(nbytes=1 << 20)
    manager.hold(gone, bodies[0])
    with pytest.raises(Refusal) as refusal:
        manager.hold(stays, bodies[1])
    assert refusal.value.code == "too_many_bodies"
    for body in bodies:
        manager.release(body)
    manager.hold(stays, Body(nbytes=1 << 19))


# Clients that do not read


def test_a_client_that_does_not_read_is_cut_off(served: Serve) -> None:
    node = served(replace(SMALL, write_timeout_s=SOON_S))
    node.echo.flood_nbytes = 1 << 30
    with node.connect() as connection:
        connection.send(head(path="/flood"))
        assert node.echo.flood_ended.wait(ANSWERED_WITHIN_S)
        until(lambda: node.gauge("pd_http_connections") == 0)
        assert node.n_refused("write_timeout") == 1


@pytest.mark.parametrize("piece_nbytes", [1 << 16, 32 << 20], ids=["stream", "whole"])
def test_a_client_that_pauses_gets_everything(served: Serve, piece_nbytes: int) -> None:
    node = served(replace(SMALL, keep_alive_s=SOON_S, head_timeout_s=SOON_S, body_timeout_s=SOON_S))
    node.echo.flood_nbytes, node.echo.flood_piece_nbytes = 32 << 20, piece_nbytes
    with node.connect() as connection:
        connection.send(head(path="/flood"))
        time.sleep(PAST_S)
        assert len(connection.answer().content) == 32 << 20
        assert node.n_refused("write_timeout") == 0


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_that_nobody_takes_does_not_keep_the_connection(served: Serve, version: str) -> None:
    node = served(replace(SMALL, write_timeout_s=SOON_S, keep_alive_s=SOON_S))
    node.echo.flood_nbytes = 32 << 20
    with node.connect() as connection:
        connection.send(head(path="/flood", version=version))
        until(lambda: node.gauge("pd_http_connections") == 1)
        until(lambda: node.gauge("pd_http_connections") == 0)


# Pipelining


def test_pipelined_requests_are_limited(served: Serve) -> None:
    node = served(replace(SMALL, max_pipelined=4))
    with node.connect() as connection:
        connection.send(head(path="/wait") + head() * 5)
        assert connection.is_closed()
        assert node.n_refused("too_many_pipelined") == 1
        until(lambda: node.gauge("pd_http_connections") == 0)
    assert node.echo.n_begun == 1


def test_a_client_that_leaves_with_requests_waiting_aborts_the_first(server_url: str, backend: FakeBackend) -> None:
    backend.script.hang_after = 2
    with RawConnection(server_url) as connection:
        connection.send(post_json("/v1/completions", {"prompt": "x", "stream": True}))
        until(lambda: len(backend.generations) == 1)
        connection.send(head(path="/health"))
        assert b"200 OK" in connection.read(100)
    until(lambda: backend.generations[0].aborted)
