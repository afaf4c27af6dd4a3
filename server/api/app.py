"""The HTTP application of one node."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.errors import install_error_handlers
from server.api.info import info_router, models_router
from server.api.middleware import ApiKey, BodyLimit, ResponseCount
from server.api.streaming import StreamTimes
from server.engine.request import Backend

MAX_BODY_NBYTES = 8 << 20


def create_app(
    backend: Backend,
    registry: CollectorRegistry,
    *,
    max_body_nbytes: int = MAX_BODY_NBYTES,
    version: str = "0.1.0",
    api_key: str | None = None,
    stream_times: StreamTimes = StreamTimes(),  # noqa: B008 - frozen
) -> FastAPI:
    """The routes for ``backend``. Those of a prefill node are the same; it refuses requests that name no room.

    ``registry`` is what ``/metrics`` shows; the count of HTTP answers is added to it, so it takes one app.
    ``api_key`` is what clients must send, if any.
    """
    app = FastAPI(
        title="dsv4-pd-server",
        version=version,
        responses={"4XX": {"description": "The request's fault"}, "5XX": {"description": "The server's fault"}},
    )
    app.state.stream_times = stream_times
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_nbytes=max_body_nbytes)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(ResponseCount, registry=registry)
    app.include_router(info_router(backend, registry))
    app.include_router(models_router(backend))
    app.include_router(completions_router(backend))
    app.include_router(chat_router(backend))
    return app
