"""Server-sent events, and watching for clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.api.errors import ClientDisconnected, error_body, failure_body
from server.failure import RequestFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COMMENT = b": waiting\n\n"
"""What every reader of server-sent events skips. It keeps proxies and clients from taking silence for an end."""

WHOLE_OR_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer, or with `stream` an event for every piece of it, and `[DONE]`",
        "content": {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}},
    }
}
"""What routes that answer either way say of it in the OpenAPI, beside their JSON."""


@dataclass(frozen=True)
class StreamTimes:
    """When a stream speaks that has no token yet. ``head_s``: its status line waits for the first token or failure, but
    no longer. ``comment_s``: from then on a comment whenever it was silent for so long. Seconds.
    """

    head_s: float = 2.0
    comment_s: float = 5.0


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client closes the connection.

    The request's body must have been read.

    :raises ClientDisconnected: the client went first.
    """
    task = asyncio.create_task(_awaited(work))
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed answer: one server-sent event for every chunk (for None a comment), then ``[DONE]``.

    The status line is out before the first chunk is made, so an error from ``chunks`` becomes an error event, and the
    stream ends without ``[DONE]``. ``on_end`` is called on every way out; that the client has gone away is noticed
    between chunks too.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any] | None],
        *,
        headers: Mapping[str, str],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnected:
            logger.debug("%s: the client closed its connection, the generation is aborted", scope["path"])
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    yield _COMMENT if chunk is None else _event(chunk)
        except RequestFailed as failure:
            yield _event(failure_body(failure))
        except Exception as error:
            logger.exception("a stream failed")
            yield _event(error_body(f"Internal error: {type(error).__name__}.", status=500, code="internal_error"))
        else:
            yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    """One event. ASCII only, since some clients split lines at U+2028 and the like."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
