"""What the server says about itself: health, readiness, models, metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from server.api.requests import check_model
from server.engine.request import Backend
from server.failure import Failure, RequestFailed

OPENMETRICS = "application/openmetrics-text"
MODEL_INFO_FIELDS = ("model_path", "tokenizer_path", "served_model_name", "model_type", "architectures", "max_context")


def info_router(backend: Backend, registry: CollectorRegistry) -> APIRouter:
    """The routes that every role has."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process works at all. 503 with the reason where it does not."""
        alive, reason = backend.alive()
        if not alive:
            raise RequestFailed(Failure("not_alive", reason))
        return {"status": "ok", "role": backend.role, "reason": reason}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether a request would be served now. 503 with the reason where it would not."""
        is_ready, reason = await backend.ready()
        if not is_ready:
            raise RequestFailed(Failure("not_ready", reason))
        return {"status": "ready", "role": backend.role, "reason": reason}

    @router.get("/server_info")
    async def get_server_info() -> dict[str, Any]:
        return server_info(backend)

    @router.get("/model_info")
    async def get_model_info() -> dict[str, Any]:
        return model_info(backend)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus text format, or OpenMetrics, with exemplars, where ``Accept`` asks for it."""
        if OPENMETRICS in request.headers.get("accept", ""):
            content, content_type = openmetrics.generate_latest(registry), openmetrics.CONTENT_TYPE_LATEST
        else:
            content, content_type = generate_latest(registry), CONTENT_TYPE_LATEST
        return Response(content, headers={"content-type": content_type})

    return router


def models_router(backend: Backend) -> APIRouter:
    """The one model that is served, in OpenAI's words."""
    router = APIRouter()
    card = {
        "id": backend.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dsv4-pd-server",
        "root": backend.model_name,
        "max_model_len": backend.max_context,
    }

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        check_model(backend, model_id)
        return card

    return router


def server_info(backend: Backend) -> dict[str, Any]:
    """What ``/server_info`` answers."""
    basics = {
        "served_model_name": backend.model_name,
        "disaggregation_mode": backend.role,
        "max_context": backend.max_context,
    }
    return basics | backend.server_info()


def model_info(backend: Backend) -> dict[str, Any]:
    """What ``/model_info`` answers: of :func:`server_info` what is about the model."""
    info = server_info(backend)
    return {"is_generation": True} | {name: info[name] for name in MODEL_INFO_FIELDS if name in info}
