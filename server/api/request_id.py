"""The name of an HTTP request: the client's ``x-request-id``, or one drawn here. Every answer has it."""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

HEADER = "x-request-id"
TRACE_HEADER = "traceparent"
MAX_CHARS = 128
_NOT_KEPT = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_GENERATING = ("/v1/", "/generate")


@dataclass
class RequestName:
    """One HTTP request. ``taken_on``: the node works for it and will log its end; ``code`` of its error, if any.

    Its head was there at ``arrived_at`` (by ``time.monotonic``). ``traceparent`` is its header, as it came, ``client``
    the address at the other end of its connection.
    """

    id: str
    taken_on: bool = False
    code: str | None = None
    traceparent: str | None = None
    client: str = ""
    arrived_at: float = field(default_factory=time.monotonic)


_current: ContextVar[RequestName | None] = ContextVar("request", default=None)


def current_request() -> RequestName | None:
    """The HTTP request that is being answered here, if any."""
    return _current.get()


def request_id() -> str:
    """Its id; a new one outside of a request."""
    current = _current.get()
    return current.id if current is not None else draw_id()


def clean(text: str) -> str:
    """What is kept of a client's id: the first :data:`MAX_CHARS` characters that are harmless in logs and headers."""
    return _NOT_KEPT.sub("", text[: 4 * MAX_CHARS])[:MAX_CHARS]


class RequestId:
    """Names every request, in the header ``x-request-id`` of its answer too. Logs those that are refused before a node
    works for them; the others are logged by the node, when they end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = RequestName(
            clean(headers.get(HEADER, "")) or draw_id(),
            traceparent=headers.get(TRACE_HEADER),
            client=(scope.get("client") or ("",))[0],
        )
        _current.set(name)  # a server gives every request a context of its own

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name.id
                if message["status"] >= 400 and not name.taken_on and scope["path"].startswith(_GENERATING):
                    log.info("request id=%s status=%d outcome=%s", name.id, message["status"], name.code or "refused")
            await send(message)

        await self._app(scope, receive, named)


def draw_id() -> str:
    """A name for a request that has none of its own."""
    return uuid.uuid4().hex
