"""The HTTP application of one node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

from server.api.bodies import bounded_route
from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.errors import install_error_handlers
from server.api.generate import generate_router
from server.api.info import info_router, models_router
from server.api.lanes import Lanes
from server.api.middleware import ApiKey, HeadAsGet, ResponseCount, WholeBody, response_counter
from server.api.page import page_router
from server.api.request_id import RequestId
from server.api.responses import responses_router
from server.api.rooms import rooms_router
from server.api.router_info import router_info_router
from server.api.status import STATUS
from server.api.streaming import StreamTimes
from server.api.tokenizing import PromptReader
from server.api.tokens import tokens_router
from server.chat.registry import ChatSettings, chat_format
from server.engine.request import Backend


def create_app(
    backend: Backend,
    registry: CollectorRegistry,
    *,
    version: str = "0.1.0",
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    stream_times: StreamTimes = StreamTimes(),  # noqa: B008 - frozen
    lanes: Lanes | None = None,
    chat_settings: ChatSettings = ChatSettings(),  # noqa: B008 - frozen
) -> FastAPI:
    """The routes for ``backend``. Those of a prefill node are the same; it refuses requests that name no room.

    ``registry`` is what ``/metrics`` shows; the count of HTTP answers is added to it, so it takes one app.
    ``api_key`` is what clients must send, if any. Browsers may use it from pages of ``cors_origins`` (``*``: of any).
    ``chat_settings`` choose the chat format and what is looked for in answers.
    What a client may cost is limited below the app, see :mod:`server.api.http_protocol`. ``lanes``, which the app
    closes at its end, are where long work waits.
    """
    lanes = lanes or Lanes()
    reader = PromptReader(backend, lanes)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(reader.start(), name="start tokenizing")
        yield
        await starting
        reader.close()
        lanes.close()

    app = FastAPI(
        title="dsv4-pd-server",
        version=version,
        lifespan=lifespan,
        docs_url=None,  # the pages of FastAPI load their scripts from the internet
        redoc_url=None,
        responses={"4XX": {"description": "The request's fault"}, "5XX": {"description": "The server's fault"}},
    )
    app.state.stream_times = stream_times
    app.state.answers_lane = lanes.answers
    install_error_handlers(app)
    app.add_middleware(WholeBody)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    responses = response_counter(registry)
    app.add_middleware(ResponseCount, responses=responses)
    app.add_middleware(HeadAsGet)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(RequestId)
    route_class = bounded_route(lanes.bodies, backend)
    app.include_router(info_router(backend, registry))
    app.include_router(models_router(backend))
    app.include_router(router_info_router(backend, version))
    app.include_router(rooms_router(backend))
    app.include_router(completions_router(backend, reader, route_class))
    chat = chat_format(backend.tokenizer, chat_settings)
    app.include_router(chat_router(backend, reader, chat, route_class))
    app.include_router(responses_router(backend, reader, chat, route_class))
    app.include_router(generate_router(backend, reader, route_class))
    app.include_router(tokens_router(backend, reader, chat, route_class))
    app.include_router(page_router())
    for route in app.routes:
        if isinstance(route, APIRoute):
            for status in (200, *sorted({*STATUS.values()})) if "POST" in (route.methods or ()) else (200,):
                responses.labels(route=route.path, status=int(status))
    return app
