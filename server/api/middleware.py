"""What wraps every HTTP request: the key it needs, its method, its body, and a count of its answer."""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import CLIENT_CLOSED_REQUEST, error_body, error_response
from server.api.page import PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"}) | PAGE_PATHS
"""For probes and scrapers, which seldom have keys, and the files of the page, which asks for the key. They show states
and counts, nothing that a client has sent.
"""
UNSENT_STATUS = "unsent_status"
"""In the request's ``state``: how it ended, where the application did not answer it."""


def response_counter(registry: CollectorRegistry) -> Counter:
    """What :class:`ResponseCount` counts in."""
    return Counter(
        "pd_http_responses_total", "HTTP answers by route and status.", ["route", "status"], registry=registry
    )


class HttpMiddleware(ABC):
    """Handles HTTP requests on their way to ``app``, and passes on what is none."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.handle if scope["type"] == "http" else self.app)(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class ApiKey(HttpMiddleware):
    """Refuses requests without ``Authorization: Bearer`` and the key with 401, except to :data:`OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        super().__init__(app)
        self._key = key.encode()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS or self._admits(scope):
            await self.app(scope, receive, send)
            return
        message = "This server wants an API key: send it in the header 'Authorization: Bearer KEY'."
        if any(name == b"authorization" for name, _ in scope["headers"]):
            message = "Incorrect API key provided."
        body = error_body(message, status=401, code="invalid_api_key")
        await error_response(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        """Takes the same time whatever is wrong with the key."""
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


class HeadAsGet(HttpMiddleware):
    """Answers HEAD as GET, without the body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, without_body)


class WholeBody(HttpMiddleware):
    """Reads a request's body before the application runs. Where the client goes first, the application never begins:
    its exceptions would keep what was read in cycles, until the garbage collector comes by.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[bytes] = []
        more_body = True
        while more_body:
            message = await receive()
            if message["type"] != "http.request":
                scope.setdefault("state", {}).setdefault(UNSENT_STATUS, CLIENT_CLOSED_REQUEST)
                return
            pieces.append(message.get("body", b""))
            more_body = message.get("more_body", False)
        waiting: list[Message] = [{"type": "http.request", "body": b"".join(pieces), "more_body": False}]
        pieces.clear()

        async def whole() -> Message:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, whole, send)


class ResponseCount(HttpMiddleware):
    """Counts answers by route and status in ``responses``, when they end."""

    def __init__(self, app: ASGIApp, responses: Counter) -> None:
        super().__init__(app)
        self._responses = responses

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500  # what the client gets if the application ends without an answer

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            status = scope.get("state", {}).get(UNSENT_STATUS, status)
            self._responses.labels(route=route, status=status).inc()
