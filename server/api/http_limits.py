"""What one HTTP client may cost: the limits, and what the client is told at each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus

from server.api.errors import RETRY_AFTER_S, error_body
from server.api.request_id import HEADER, draw_id

SMALL_BODY_NBYTES = 64 << 10
"""So much of every body is always taken: large bodies cannot keep out small requests."""
CHUNK_BYTES_A_FRAMING_BYTE = 8
"""Content that pays for one byte of chunk framing: chunks of a few bytes cost much more time than memory."""


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one node's HTTP port. They hold before the API key is looked at. Sizes in bytes, times in seconds."""

    max_connections: int = 1024
    max_refused: int = 128
    """Connections beside them that have been refused, and are open for a moment until their clients know."""
    max_head_nbytes: int = 64 << 10
    """Request line and headers; also the trailers of a chunked body."""
    max_headers: int = 100
    max_url_nbytes: int = 8 << 10
    max_body_nbytes: int = 8 << 20
    max_held_body_nbytes: int = 64 << 20
    """All bodies whose requests are not over, beyond the first :data:`SMALL_BODY_NBYTES` of each connection's."""
    max_pipelined: int = 8
    """Requests of one connection that wait for the one before them."""
    head_timeout_s: float = 10.0
    """From the first byte of a head to its last."""
    body_timeout_s: float = 30.0
    """From the end of the head to the end of the body."""
    keep_alive_s: float = 75.0
    """How long a connection may be open without a request."""
    write_timeout_s: float = 30.0
    """How long a client that does not read may hold an answer."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is not read to its end. ``code`` is also the reason in ``pd_http_refused_total``."""

    status: int
    code: str
    message: str

    def response(self, default_headers: list[tuple[bytes, bytes]]) -> bytes:
        """The whole answer, after which the connection is closed. Its request was not read, so its id is drawn."""
        request_id = draw_id()
        body = error_body(self.message, status=self.status, code=self.code)
        body["error"]["request_id"] = request_id
        content = json.dumps(body).encode()
        headers = [
            *default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"connection", b"close"),
            (HEADER.encode(), request_id.encode()),
        ]
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in headers]
        return b"\r\n".join(lines) + b"\r\n\r\n" + content


def head_too_large(limits: HttpLimits) -> Refusal:
    most = f"{limits.max_head_nbytes} bytes or {limits.max_headers} headers"
    return Refusal(431, "headers_too_large", f"The headers or trailers are more than {most}.")


def url_too_long(limits: HttpLimits) -> Refusal:
    return Refusal(414, "url_too_long", f"The URL is longer than {limits.max_url_nbytes} bytes.")


def body_too_large(limits: HttpLimits) -> Refusal:
    return Refusal(413, "body_too_large", f"The body is larger than {limits.max_body_nbytes} bytes.")


def chunks_too_small(limits: HttpLimits) -> Refusal:
    message = "The chunks of the body are too small, or their extensions too long: send larger ones."
    return Refusal(413, "chunks_too_small", message)


def head_too_slow(limits: HttpLimits) -> Refusal:
    return Refusal(408, "head_timeout", f"The headers did not arrive within {limits.head_timeout_s:g} s.")


def body_too_slow(limits: HttpLimits) -> Refusal:
    return Refusal(408, "body_timeout", f"The body did not arrive within {limits.body_timeout_s:g} s.")


def too_many_connections(limits: HttpLimits) -> Refusal:
    message = f"The server has {limits.max_connections} open connections, and takes no more."
    return Refusal(503, "too_many_connections", message)


def too_many_bodies(limits: HttpLimits) -> Refusal:
    message = f"The server holds {limits.max_held_body_nbytes} bytes of request bodies, and takes no more."
    return Refusal(503, "too_many_bodies", message)


def too_many_pipelined(limits: HttpLimits) -> Refusal:
    message = f"More than {limits.max_pipelined} requests wait on this connection for the one before them."
    return Refusal(503, "too_many_pipelined", message)


def malformed(reason: str) -> Refusal:
    return Refusal(400, "malformed_request", f"This is not an HTTP/1 request: {reason}.")
