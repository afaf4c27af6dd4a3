"""Streams: their chunks, as server-sent events, and watching for clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.api.answers import Writer
from server.api.errors import ClientDisconnected, failure_body, internal_error
from server.api.generations import Generations
from server.api.request_id import request_id
from server.api.schemas import StreamOptions
from server.engine.request import TokenOutput
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
    """What a stream sends that has no token yet, in seconds. ``head_s``: its status line waits for the first token or
    failure, but no longer. ``comment_s``: from then on a comment whenever it was silent for so long.
    """

    head_s: float = 2.0
    comment_s: float = 5.0


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client closes the connection.

    The request's body must have been read.

    :raises ClientDisconnected: the client went first.
    """
    task = asyncio.ensure_future(work)
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def chunks_of(
    first: tuple[int, TokenOutput] | None,
    rest: AsyncGenerator[tuple[int, TokenOutput] | None],
    generations: Generations,
    n_open: int,
    writer: Writer,
    options: StreamOptions,
    silence_s: float,
) -> AsyncGenerator[dict[str, Any] | None]:
    """The chunks for these outputs of ``n_open`` generations, and the usage chunk (without choices) where it was asked
    for. None stands for a comment: where nothing came, and where what came had nothing to say for ``silence_s``.
    """
    spoke_at = time.monotonic()
    async with aclosing(rest):
        async for item in _all(first, rest):
            chunks = []
            if item is not None:
                index, output = item
                writer.usage.add(output)
                chunks = [writer.chunk([choice]) for choice in writer.chunk_choices(index, output)]
                if options.include_usage or options.continuous_usage_stats:
                    for chunk in chunks:
                        chunk["usage"] = writer.usage.as_dict() if options.continuous_usage_stats else None
                n_open -= output.finish_reason is not None
                if not n_open and not options.include_usage:
                    chunks[-1]["pd"] = pd_object(generations.route_headers)
            for chunk in chunks:
                yield chunk
            if not chunks:
                if item is not None and time.monotonic() - spoke_at < silence_s:
                    continue
                yield None
            spoke_at = time.monotonic()
    if options.include_usage:
        yield writer.chunk([]) | {"usage": writer.usage.as_dict(), "pd": pd_object(generations.route_headers)}


async def _all(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    yield first
    async for item in rest:
        yield item


def pd_object(headers: Mapping[str, str]) -> dict[str, str]:
    """What the headers of an answer say, for its body: ``{"request_id", "prefill", "room", ...}``."""
    return {"request_id": request_id()} | {
        name.removeprefix("x-pd-").replace("-", "_"): value for name, value in headers.items()
    }


class EventStream(Response):
    """A streamed answer: one server-sent event for every chunk (for None a comment), then ``[DONE]``.

    The status line is out before the first chunk is made, so an error from ``chunks`` becomes an error event, and the
    stream ends without ``[DONE]``. ``on_end`` is called however the stream ends; that the client has gone away is
    noticed between chunks too.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any] | None],
        *,
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnected:
            logger.debug("%s: the client closed its connection, the generation is aborted", scope["path"])
        finally:
            if self._on_end is not None:
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
            yield _event(failure_body(internal_error(error)))
        else:
            yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    """One event. ASCII only, since some clients split lines at U+2028 and the like."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
