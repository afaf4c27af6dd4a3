"""What routers ask a node beside its generation routes: SGLang's names, loads, a health check that generates, and to
forget what it keeps of prompts.

There is no ``/version``: ``smg`` takes whoever answers it for vLLM, and then sends requests without rooms.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from server.api.generations import Generations
from server.api.info import model_info, server_info
from server.api.request_id import draw_id
from server.engine.request import PREFILL_ROLE, Backend, GenerationRequest, SamplingParams
from server.failure import Failure, RequestFailed

HEALTH_GENERATE_S = 20.0
"""How long ``/health_generate`` waits for its token."""


def router_info_router(backend: Backend, version: str) -> APIRouter:
    """The routes that every role has."""
    router = APIRouter()
    check = GeneratingCheck(backend)

    @router.get("/get_server_info")
    async def get_server_info() -> dict[str, Any]:
        """As ``/server_info``."""
        return server_info(backend)

    @router.get("/get_model_info")
    async def get_model_info() -> dict[str, Any]:
        """As ``/model_info``."""
        return model_info(backend)

    @router.get("/get_load")
    async def get_load() -> list[dict[str, int]]:
        """What routers that choose by load ask for: requests under way and waiting, and tokens held."""
        return [{"dp_rank": 0, **backend.load()}]

    @router.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """The same in the words of SGLang's newer route. All of it is answered, whatever parts are asked for."""
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": version,
            "dp_rank_count": 1,
            "loads": [load_entry(backend)],
        }

    @router.get("/health_generate")
    async def health_generate() -> dict[str, str]:
        """Whether a token is really generated now; a prefill node, which has no room for one, answers as ``/ready``.

        503 with the reason where none is, or it takes longer than :data:`HEALTH_GENERATE_S`: also on a node that has
        much to do.
        """
        return {"status": "ok", "role": backend.role, "reason": await check.run()}

    @router.get("/flush_cache", include_in_schema=False, response_class=PlainTextResponse)
    @router.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache() -> str:
        """Forgets what is kept of prompts, as SGLang's route. Requests under way go on with what they use."""
        return f"Cache flushed.\n{backend.flush_cache()} pages are forgotten.\n"

    @router.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache() -> Response:
        """The same as vLLM's route: 200 without a body."""
        backend.flush_cache()
        return Response()

    return router


def load_entry(backend: Backend) -> dict[str, Any]:
    """One of ``/v1/loads``' list. ``token_usage`` is the part of all pages that is held, from 0 to 1."""
    load = backend.load()
    n_total, n_waiting = load["num_reqs"], load["num_waiting_reqs"]
    return {
        "dp_rank": 0,
        "num_running_reqs": n_total - n_waiting,
        "num_waiting_reqs": n_waiting,
        "num_total_reqs": n_total,
        "num_used_tokens": load["num_tokens"],
        "max_total_num_tokens": load["max_total_num_tokens"],
        "token_usage": load["num_tokens"] / max(1, load["max_total_num_tokens"]),
        "max_running_requests": load["max_running_requests"],
    }


class GeneratingCheck:
    """Generates one token to see whether that works. Whoever asks meanwhile gets the same answer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: asyncio.Task[str] | None = None

    async def run(self) -> str:
        """What was seen.

        :raises RequestFailed: 503 or what the generation failed with.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._generate(), name="health_generate")
            self._running.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may ask
        return await asyncio.shield(self._running)

    async def _generate(self) -> str:
        backend = self._backend
        if backend.role == PREFILL_ROLE:
            is_ready, reason = await backend.ready()
            if not is_ready:
                raise RequestFailed(Failure("not_ready", reason))
            return reason
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = GenerationRequest(f"health-{draw_id()}", (0,), sampling)
        generations = Generations(backend, [request])
        try:
            if not await generations.wait(HEALTH_GENERATE_S):
                raise RequestFailed(Failure("not_ready", f"no token was generated within {HEALTH_GENERATE_S:g} s"))
            return "one token was generated"
        finally:
            generations.abort()
