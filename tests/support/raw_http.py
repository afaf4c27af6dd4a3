"""HTTP by hand, over sockets: requests that no client library would send, and an app to send them to."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import socket
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Receive, Scope, Send

ANSWERED_WITHIN_S = 20.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.content)["error"]
        return error

    @property
    def seen(self) -> dict[str, Any]:
        """What :class:`Echo` saw."""
        seen: dict[str, Any] = json.loads(self.content)
        return seen


class _KeptOpen(io.BufferedReader):
    """``HTTPResponse`` closes what it has read from."""

    def close(self) -> None:
        pass


class RawConnection(contextlib.AbstractContextManager["RawConnection"]):
    """One connection to the server at ``url``."""

    def __init__(self, url: str, receive_nbytes: int | None = None) -> None:
        """``receive_nbytes`` is the size of the buffer for what the server sends."""
        parts = urlsplit(url)
        self.socket = socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET)
        self.socket.settimeout(ANSWERED_WITHIN_S)
        if receive_nbytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
        self.socket.connect((parts.hostname, parts.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = _KeptOpen(self.socket.makefile("rb", buffering=0))

    def __exit__(self, *_: object) -> None:
        self._file.raw.close()
        self.socket.close()

    def send(self, data: bytes) -> RawConnection:
        self.socket.sendall(data)
        return self

    def send_until_refused(self, piece: bytes, most_nbytes: int) -> int:
        """Sends ``piece`` again and again, until the server has closed or ``most_nbytes`` are out; how many were."""
        n_sent = 0
        with contextlib.suppress(ConnectionError):
            while n_sent < most_nbytes:
                self.socket.sendall(piece)
                n_sent += len(piece)
        return n_sent

    def answer(self, method: str = "GET") -> Answer:
        """The next answer. Interim answers (1xx) are passed over."""
        response = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        response.begin()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def makefile(self, *_: object) -> _KeptOpen:
        """For ``HTTPResponse``: the same for all answers, since it reads ahead."""
        return self._file

    def read(self, n: int) -> bytes:
        return self._file.read1(n)

    def is_closed(self) -> bool:
        """Whether the server closes the connection without another byte. Raises ``TimeoutError`` if it does neither."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True


def head(method: str = "GET", path: str = "/", *, version: object = "1.1", **headers: object) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def post(body: bytes, path: str = "/", **headers: object) -> bytes:
    return head("POST", path, Content_Length=len(body), **headers) + body


def post_json(path: str, body: object) -> bytes:
    return post(json.dumps(body).encode(), path, Content_Type="application/json")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class Echo:
    """An app that answers with what it saw. A request to ``/wait`` is answered when ``go_on`` is set; one to ``/flood``
    gets ``flood_nbytes``.
    """

    go_on: threading.Event = field(default_factory=threading.Event)
    n_begun: int = 0
    flood_nbytes: int = 0
    flood_piece_nbytes: int = 1 << 16
    flood_ended: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """As if it was new. Requests that waited do not wait any more."""
        self.go_on.set()
        vars(self).update(vars(Echo()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        go_on = self.go_on
        self.n_begun += 1
        if scope["path"] == "/flood":
            await self._flood(send, self.flood_ended)
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        while scope["path"] == "/wait" and not go_on.is_set():  # noqa: ASYNC110  (set by another thread)
            await asyncio.sleep(0.005)
        seen = {
            "method": scope["method"],
            "path": scope["path"],
            "version": scope["http_version"],
            "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
            "nbytes": len(body),
            "body": body[:100].decode(),
        }
        content = json.dumps(seen).encode()
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _flood(self, send: Send, ended: threading.Event) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(self.flood_nbytes // self.flood_piece_nbytes):
                await send({"type": "http.response.body", "body": bytes(self.flood_piece_nbytes), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            ended.set()
