"""What the node knows of its requests and its memory, as JSON: docs/rooms.md has every field."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Response

from server.engine.request import Backend
from server.failure import Failure, RequestFailed

MAX_LISTED = 256
"""In the event loop: a record takes some ten microseconds, and less when it has been listed before."""
_JSON = "application/json"


def rooms_router(backend: Backend) -> APIRouter:
    """``/rooms``, ``/rooms/{id}`` and ``/state``: each is bounded, so that no client can make them long."""
    router = APIRouter()

    @router.get("/rooms", response_class=Response)
    async def list_rooms(limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 64) -> Response:
        """The records of requests under way, of the last that ended, and the last refusals; newest first."""
        return _json(backend.rooms(limit))

    @router.get("/rooms/{room}", response_class=Response)
    async def show_room(room: Annotated[str, Path(pattern="^[0-9]{1,19}$")]) -> Response:
        """The newest record of one room."""
        record = backend.room(int(room))
        if record is None:
            raise RequestFailed(Failure("room_not_found", f"no record of room {room} is kept here"))
        return _json(record)

    @router.get("/state", response_class=Response)
    async def state() -> Response:
        """Slots, pages, bytes, accept lengths, failures, quarantine and peers, now."""
        return _json(backend.state())

    return router


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type=_JSON)
