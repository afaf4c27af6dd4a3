"""What HTTP/1 allows still works behind the limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from tests.support.http import http_server_thread
from tests.support.raw_http import Echo, RawConnection, chunk, head, post


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server_thread(Echo(), CollectorRegistry()) as url:
        yield url


@pytest.fixture
def connection(url: str) -> Iterator[RawConnection]:
    with RawConnection(url) as connection:
        yield connection


@pytest.mark.parametrize("n", [1, 7])
def test_requests_follow_each_other_on_a_connection(connection: RawConnection, n: int) -> None:
    sent = [head(path=f"/{i}") if i % 2 else post(b"body", X_Number=i) for i in range(4)]
    for request in sent:
        for start in range(0, len(request), len(request) // n + 1):
            connection.send(request[start : start + len(request) // n + 1])
        assert connection.answer().status == 200


def test_pipelined_requests_are_answered_in_order(connection: RawConnection) -> None:
    connection.send(b"".join(head(path=f"/{i}") + post(b"x" * i) for i in range(4)))
    for i in range(4):
        assert connection.answer().seen["path"] == f"/{i}"
        assert connection.answer().seen["nbytes"] == i


def test_one_byte_at_a_time(connection: RawConnection) -> None:
    request = head("POST", Transfer_Encoding="chunked") + chunk(b"hello") + b"0\r\nx-trailer: 1\r\n\r\n"
    for i in range(len(request)):
        connection.send(request[i : i + 1])
    assert connection.answer().seen["body"] == "hello"


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}])
def test_http_1_0(connection: RawConnection, headers: dict[str, str]) -> None:
    answer = connection.send(head(version="1.0", **headers)).answer()
    assert answer.seen["version"] == "1.0"
    assert connection.is_closed()


def test_a_client_may_wait_for_100_continue(connection: RawConnection) -> None:
    connection.send(head("POST", Content_Length=5, Expect="100-continue"))
    assert connection.read(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert connection.send(b"hello").answer().seen["body"] == "hello"


def test_trailers_are_read_and_are_no_headers(connection: RawConnection) -> None:
    body = chunk(b"hello") + b"0\r\nAuthorization: Bearer x\r\nX-Checksum: 1\r\n\r\n"
    connection.send(head("POST", Transfer_Encoding="chunked") + body + head(path="/next"))
    seen = connection.answer().seen
    assert seen["body"] == "hello"
    assert set(seen["headers"]) == {"host", "transfer-encoding"}
    assert connection.answer().seen["path"] == "/next"


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_a_wish_for_another_protocol_is_passed_over(connection: RawConnection, protocol: str) -> None:
    wish = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAMAAABkAAQAAP"}
    connection.send(post(b"hello", **wish)[:-2])
    seen = connection.send(b"lo" + head(path="/next", **wish)).answer().seen
    assert (seen["method"], seen["body"]) == ("POST", "hello")
    assert "upgrade" not in seen["headers"]
    assert connection.answer().seen["path"] == "/next"


def test_head_answers_have_no_body(connection: RawConnection) -> None:
    assert connection.send(head("HEAD")).answer("HEAD").content == b""
    assert connection.send(head(path="/next")).answer().seen["path"] == "/next"
