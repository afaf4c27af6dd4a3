"""uvicorn's HTTP/1 protocol with limits: on heads, bodies, times and connections, before any of the application runs.

uvicorn with httptools has none of them: a head is collected, and every header made an object, however long it is.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.api.direct_body import DirectBody, offer_direct_body
from server.api.http_connections import Body, ConnectionManager
from server.api.http_limits import CHUNK_BYTES_A_FRAMING_BYTE, Refusal
from server.api.middleware import UNSENT_STATUS
from server.api.reading_turns import FairFlow

logger = logging.getLogger(__name__)

_GRACE_S = 0.25
"""At the end of a time limit, so that what came while this process was busy is still read."""
_LINGER_S = 2.0
"""How long a refused client may go on sending: closing at once would reset the connection, and lose the answer."""
_MIN_DRAINED_NBYTES = 32 << 10
"""What a client that is slow to read must take in each ``write_timeout_s``."""
_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


def http_config(app: Callable[..., Any], manager: ConnectionManager, **settings: Any) -> uvicorn.Config:
    """uvicorn's settings for ``app`` behind the limits of ``manager``; without WebSockets, which would pass them by."""
    protocol: Any = functools.partial(LimitedHttpProtocol, manager)
    return uvicorn.Config(app, http=protocol, ws="none", **settings)


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. What it reads is at any time a head (or nothing yet) or a body; each of them has a limit of bytes
    and of time. A refusal is answered in the server's own shape, and ends the connection.
    """

    def __init__(
        self,
        manager: ConnectionManager,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = manager.limits.keep_alive_s  # type: ignore[assignment]
        self._manager, self._limits = manager, manager.limits
        self._application = self.app
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or the last one that was; those behind it are in ``pipeline``."""
        self._unbegun: set[Body] = set()
        """Of requests that the application has not seen."""
        self._body = Body()
        """Of the request that was read last."""
        self._in_body = False
        self._head_begun = False
        self._is_replaying = False
        self._n_stages = 0
        """Grows whenever a head or a body is complete."""
        self._stage_nbytes = 0
        """Read of the present head or body (of its first bytes, only those that came alone)."""
        self._gap_nbytes = 0
        """Read of the present body since its last content: chunk framing, or trailers."""
        self._n_fields, self._fields_nbytes = 0, 0
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._unsent_nbytes = 0
        self._is_refused = False
        self._direct_body: DirectBody | None = None
        """Of the request that is being answered."""

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._flow = FairFlow(transport, self._manager.turns, functools.partial(self._manager.is_growing, self))
        self.flow = self._flow
        self._wait_for_request()
        self._manager.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._manager.turns.leave(self._flow)
        self._unset_keepalive_if_required()
        self._cancel_deadline()
        self._cancel_write_deadline()
        if self._running is not None:  # uvicorn notifies only the last of several requests
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        for body in self._unbegun:
            self._manager.release(body)
        self._manager.closed(self)

    def give_way(self) -> None:
        if self._head_begun and not self._is_refused:
            self._write_refusal(self._limits.refusal("too_many_connections"))
            self.transport.close()
            self._watch_writing()
        else:
            self._close()
        self._manager.closed(self)

    def refuse(self, refusal: Refusal) -> None:
        """Answers with ``refusal`` if nothing else was answered or is being answered, and closes the connection."""
        if self.transport.is_closing():  # the client has gone
            self._manager.body_ended(self)
            self._manager.release(self._body)
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self.parser = None  # type: ignore[assignment]
        self._unset_keepalive_if_required()
        self._cancel_deadline()
        self._manager.body_ended(self)
        self._manager.release(self._body)
        if not self._may_answer():
            self._manager.count_refusal(refusal)
            self.transport.abort()
            return
        if self._in_body:
            self._abandon_request(refusal)
        self._write_refusal(refusal)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._stage_nbytes = 0
        self._deadline = self.loop.call_later(_LINGER_S, self._close)
        self._manager.closes(self)

    def _may_answer(self) -> bool:
        """Whether the next bytes to the client may be the answer to what is being read."""
        running = self._running
        if self._in_body:  # of the last request, which the pipeline may hold
            return self.cycle is running and not self.cycle.response_started
        return running is None or running.response_complete

    def _abandon_request(self, refusal: Refusal) -> None:
        """To the application the client is gone."""
        self.scope["state"][UNSENT_STATUS] = refusal.status
        self.cycle.body = bytearray()
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()

    def _write_refusal(self, refusal: Refusal) -> None:
        self._manager.count_refusal(refusal)
        self.transport.write(refusal.response(self.server_state.default_headers))

    def _close(self) -> None:
        """Closes without waiting for a client that does not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    # Reading

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_refused:
            self._stage_nbytes += len(data)
            if self._stage_nbytes > self._limits.max_body_nbytes:
                self.transport.abort()
            return
        stage, content_nbytes, head_nbytes = self._n_stages, self._body.nbytes, -1
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head_nbytes = upgrade.args[0]
        except httptools.HttpParserError as error:
            self.refuse(self._refusal_of(error))
            return
        if head_nbytes >= 0:  # not in the handler: what is raised there has the upgrade for its context, and no Refusal
            self._ignore_upgrade(data[head_nbytes:])
            return
        if self._n_stages == stage:
            self._stage_nbytes += len(data)
            self._gap_nbytes = self._gap_nbytes + len(data) if self._body.nbytes == content_nbytes else 0
            if refusal := self._unfinished_too_large():
                self.refuse(refusal)
                return
        self._set_deadline()

    def _refusal_of(self, error: httptools.HttpParserError) -> Refusal:
        """What one of the parser's callbacks raised, or that the parser cannot read this."""
        if isinstance(error.__context__, Refusal):
            return error.__context__
        if isinstance(error, httptools.HttpParserCallbackError):
            logger.error("a request could not be read: %r", error.__context__ or error)
        return self._limits.refusal("malformed_request", reason=str(error) or "it cannot be parsed")

    def _unfinished_too_large(self) -> Refusal | None:
        """What the parser's callbacks have not seen, since it has no end yet."""
        most = self._limits.max_head_nbytes
        if (self._gap_nbytes if self._in_body else self._stage_nbytes) > most:
            return self._limits.refusal("headers_too_large")
        framing_nbytes = self._stage_nbytes - self._body.nbytes if self._in_body else 0
        if framing_nbytes > most + self._body.nbytes // CHUNK_BYTES_A_FRAMING_BYTE:
            return self._limits.refusal("chunks_too_small")
        return None

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Reads the request again without its wish for another protocol: the parser has skipped its body."""
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        head += [name + b": " + value for name, value in self.headers if name not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_replaying = False
        self._n_fields = self._fields_nbytes = 0
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_begun = True
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise self._limits.refusal("too_many_pipelined")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url_nbytes:
            raise self._limits.refusal("url_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._n_fields += 1
        self._fields_nbytes += len(name) + len(value) + len(b": \r\n")
        if self._n_fields > self._limits.max_headers or self._fields_nbytes > self._limits.max_head_nbytes:
            raise self._limits.refusal("headers_too_large")
        if not self._in_body:  # else it is a trailer, and those are no headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._limits.refusal("malformed_request", reason="CONNECT is for proxies")
            self._is_replaying = True
            return
        if _declared_nbytes(self.headers) > self._limits.max_body_nbytes:
            raise self._limits.refusal("body_too_large")
        body = Body()
        self.app = functools.partial(self._run, body)
        super().on_headers_complete()
        if self.pipeline:  # only one body of a connection is free
            body.free_nbytes = 0
            self.flow.resume_reading()  # uvicorn stops, and would not see the client go
        self._next_stage()
        self._head_begun, self._in_body, self._body = False, True, body
        self._unbegun.add(body)
        self._manager.has_request(self)

    def on_body(self, body: bytes) -> None:
        self._body.nbytes += len(body)
        if self._body.nbytes > self._limits.max_body_nbytes:
            raise self._limits.refusal("body_too_large")
        if not self.cycle.response_complete:
            self._manager.hold(self, self._body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_replaying:
            return
        self._next_stage()
        self._in_body = False
        self._manager.body_ended(self)
        super().on_message_complete()
        if self._is_idle():  # it was answered before its body was complete
            self._manager.waits(self)

    def _next_stage(self) -> None:
        self._n_stages += 1
        self._stage_nbytes = self._gap_nbytes = self._n_fields = self._fields_nbytes = 0
        self._cancel_deadline()

    # Answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._direct_body = offer_direct_body(cycle) if cycle.scope["method"] == "POST" else None
        super()._start_asgi_task(cycle, app)

    async def _run(self, body: Body, scope: Any, receive: Any, send: Any) -> None:
        """The application. Its body counts until it ends, since it may keep it until then."""
        self._unbegun.discard(body)
        try:
            await self._application(scope, receive, send)
        finally:
            self._manager.release(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_writing()
        elif self._is_idle():
            self._manager.waits(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_write_deadline()
        if self._direct_body is not None:  # last of all: it may fill the connection again, which has a new deadline
            self._direct_body.resumed()

    def _watch_writing(self) -> None:
        """Gives the client time to take what is written. The transport alone would wait for ever."""
        if self._write_deadline is None and (unsent_nbytes := self.transport.get_write_buffer_size()):
            self._unsent_nbytes = unsent_nbytes
            self._write_deadline = self.loop.call_later(self._limits.write_timeout_s, self._on_slow_reader)

    def _on_slow_reader(self) -> None:
        self._write_deadline = None
        unsent_nbytes = self.transport.get_write_buffer_size()
        if not unsent_nbytes or self._unsent_nbytes - unsent_nbytes >= _MIN_DRAINED_NBYTES:
            self._watch_writing()
            return
        self._manager.count_refusal(self._limits.refusal("write_timeout"))
        self.transport.abort()

    # Times

    def _is_idle(self) -> bool:
        """Whether there is nothing of a request: neither read, nor under way, nor waiting."""
        is_over = self._running is None or self._running.response_complete
        return is_over and not (self._in_body or self._head_begun or self._stage_nbytes or self.pipeline)

    def _wait_for_request(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # the client still takes the answer
            self._watch_writing()
            self._wait_for_request()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(_GRACE_S, self._close)

    def _set_deadline(self) -> None:
        if self._in_body or self._head_begun or self._stage_nbytes:
            if self._deadline is None:
                timeout_s = self._limits.body_timeout_s if self._in_body else self._limits.head_timeout_s
                self._deadline = self.loop.call_later(timeout_s, self._on_deadline)
        elif self._is_idle() and self.timeout_keep_alive_task is None:
            self._wait_for_request()

    def _on_deadline(self) -> None:
        self._deadline = self.loop.call_later(_GRACE_S, self._on_grace_over)

    def _on_grace_over(self) -> None:
        """The client is too slow, unless it waits for us: for the answer before, or for the application to read."""
        self._deadline = None
        is_answering = self._running is not None and not self._running.response_complete
        is_own_body = self._in_body and self.cycle is self._running
        if self.flow.read_paused or (is_answering and not is_own_body):
            self._set_deadline()
        elif self._in_body:
            self.refuse(self._limits.refusal("body_timeout"))
        else:
            self.refuse(self._limits.refusal("head_timeout"))

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None


def _declared_nbytes(headers: list[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return 0
