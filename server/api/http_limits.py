"""What one HTTP client may cost: the limits, and the answer at each."""

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


class Refusal(Exception):
    """Why a request is not read to its end. ``code`` is also the reason in ``pd_http_refused_total``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

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


REFUSALS = {
    "malformed_request": (400, "This is not an HTTP/1 request: {reason}."),
    "head_timeout": (408, "The headers did not arrive within {head_timeout_s:g} s."),
    "body_timeout": (408, "The body did not arrive within {body_timeout_s:g} s."),
    "write_timeout": (408, "A client does not read its answer; the connection is closed."),
    "body_too_large": (413, "The body is larger than {max_body_nbytes} bytes."),
    "chunks_too_small": (
        413,
        "The chunks of the body are too small, or their extensions too long: send larger ones.",
    ),
    "url_too_long": (414, "The URL is longer than {max_url_nbytes} bytes."),
    "headers_too_large": (
        431,
        "The headers or trailers are more than {max_head_nbytes} bytes or {max_headers} headers.",
    ),
    "too_many_connections": (503, "The server has {max_connections} open connections, and takes no more."),
    "too_many_bodies": (503, "The server holds {max_held_body_nbytes} bytes of request bodies, and takes no more."),
    "too_many_pipelined": (
        503,
        "More than {max_pipelined} requests wait on this connection for the one before them.",
    ),
}
"""Status and message of each refusal by its code. The messages name the fields of :class:`HttpLimits`."""


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

    def refusal(self, code: str, **details: str) -> Refusal:
        """The refusal of this code; ``details`` is what its message says beside the limits."""
        status, message = REFUSALS[code]
        return Refusal(status, code, message.format(**vars(self), **details))
