"""Streams: server-sent events on their way to the client, and watching for clients that go away."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.api.chunks import COMMENT, StreamChunks
from server.api.direct_body import DirectBody, direct_body
from server.api.errors import ClientDisconnected, internal_error
from server.api.generations import Generations
from server.api.lanes import Lane
from server.api.prompt_logprobs import INLINE_ENTRIES
from server.failure import RequestFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WRITE_NBYTES = 1 << 14
"""What is spelled and written in one go, about: a client that is slow to read should not cost more memory."""

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


class EventStream(Response):
    """A streamed answer that is known already: ``events``, one after the other."""

    media_type = "text/event-stream"

    def __init__(self, events: Sequence[bytes] = (), *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(scope, send))
        except ClientDisconnected:
            logger.debug("%s: the client closed its connection, the generation is aborted", scope["path"])

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_events(scope, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, scope: Scope, send: Send) -> None:
        for each in self._events:
            await _send(send, each)


class LiveStream(EventStream):
    """A streamed answer as it is generated: events for every output, then ``[DONE]``; comments where it is silent.

    The status line is out before the first chunk is made, so that a failure becomes an error event, and the stream ends
    without ``[DONE]``. However it ends, the generations are aborted then; that the client has gone away is noticed
    between chunks too.

    With ``lane`` a chunk may be long, because it has the log probabilities of the prompt or of the whole answer so far:
    it is spelled there.
    """

    def __init__(
        self,
        generations: Generations,
        chunks: StreamChunks,
        comment_s: float,
        *,
        headers: Mapping[str, str],
        lane: Lane | None = None,
    ) -> None:
        super().__init__(headers=headers)
        self._generations, self._chunks, self._comment_s, self._lane = generations, chunks, comment_s, lane
        self._spoke_at = time.monotonic() if generations.has_waiting else -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generations.abort()

    async def _send_events(self, scope: Scope, send: Send) -> None:
        try:
            if (lane := self._lane) is not None:
                await self._send_each(send, partial(self._spelled_in, lane))
            elif (body := direct_body(scope)) is not None:
                await self._write_directly(body)
            else:
                await self._send_each(send, self._spelled)
        except RequestFailed as failure:
            await self._send_failure(send, failure)
        except Exception as error:
            logger.exception("a stream failed")
            await self._send_failure(send, internal_error(error))
        else:
            for each in self._chunks.end():
                await _send(send, each)

    async def _send_failure(self, send: Send, failure: RequestFailed) -> None:
        for each in self._chunks.failed(failure):
            await _send(send, each)

    async def _write_directly(self, body: DirectBody) -> None:
        """The outputs are written in the call that brings them; this task waits for the end, and comments on silence.

        While the client is slow to read they wait where they are.
        """
        generations = self._generations

        def write_waiting() -> None:
            while not body.is_full and generations.has_waiting:
                body.write(self._next_events())

        with generations.read_by(write_waiting), body.on_room(generations.read):
            while not generations.is_over:
                await generations.wait(self._patience_s)
                if not generations.is_over and self._is_comment_due() and not body.is_full:
                    body.write([COMMENT])

    async def _send_each(self, send: Send, spelled: Callable[[], Awaitable[list[bytes]]]) -> None:
        """The outputs go through ``send``, one after the other, as ``spelled`` has the next of them."""
        generations = self._generations
        while not generations.is_over:
            await generations.wait(self._patience_s)
            while generations.has_waiting:
                for each in await spelled():
                    await _send(send, each)
            if not generations.is_over and self._is_comment_due():
                await _send(send, COMMENT)

    async def _spelled(self) -> list[bytes]:
        return self._next_events()

    async def _spelled_in(self, lane: Lane) -> list[bytes]:
        """The events for the next output."""
        item = self._generations.take()
        if item is None:
            return []
        size = self._chunks.size(*item)
        spell = partial(self._chunks.events, *item)
        events = spell() if size <= INLINE_ENTRIES else await lane.run(size, spell)
        self._spoke_at = time.monotonic()
        return events

    def _next_events(self) -> list[bytes]:
        """The events for what waits, up to some :data:`_WRITE_NBYTES`."""
        events: list[bytes] = []
        nbytes = 0
        while nbytes < _WRITE_NBYTES and (item := self._generations.take()) is not None:
            new = self._chunks.events(*item)
            nbytes += sum(map(len, new))
            events += new
        if events:
            self._spoke_at = time.monotonic()
        return events

    @property
    def _patience_s(self) -> float:
        """How long the stream may still be silent."""
        return max(0.0, self._spoke_at + self._comment_s - time.monotonic())

    def _is_comment_due(self) -> bool:
        """Whether the stream was silent for too long. The time counts anew from then on."""
        if self._patience_s > 0:
            return False
        self._spoke_at = time.monotonic()
        return True


async def _send(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
