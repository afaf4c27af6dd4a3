"""A streamed body written straight to its connection: without a task to wake, and without the way through ASGI."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "pd.direct_body"
"""Among the ``extensions`` of an ASGI scope, where the server of a request has this."""


class DirectBody:
    """The body of one answer, whose head went out through ``send`` and whose end will. Used in the event loop.

    Whoever writes must look at :attr:`is_full` before: what is written then would wait in this process's memory.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport
        self._has_room: Callable[[], None] | None = None

    @property
    def is_chunked(self) -> bool:
        """Whether the head has said that the body comes in chunks: only then may it be written here."""
        return self._cycle.response_started and bool(self._cycle.chunked_encoding)

    @property
    def is_full(self) -> bool:
        """Whether the client is slow to read."""
        return self._flow.write_paused

    def write(self, pieces: Sequence[bytes]) -> None:
        """Writes pieces, none of them empty, each as a chunk of its own, and all in one call of the system."""
        if not self._cycle.disconnected:
            self._transport.write(b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]))

    @contextlib.contextmanager
    def on_room(self, call: Callable[[], None]) -> Iterator[None]:
        """Inside, ``call`` is called whenever the body is not full any more."""
        self._has_room = call
        try:
            yield
        finally:
            self._has_room = None

    def resumed(self) -> None:
        """The connection takes more."""
        if self._has_room is not None:
            self._has_room()


def offer_direct_body(cycle: RequestResponseCycle) -> DirectBody:
    """Puts the direct body of ``cycle`` into its scope."""
    body = DirectBody(cycle)
    scope: Any = cycle.scope
    scope.setdefault("extensions", {})[_EXTENSION] = body
    return body


def direct_body(scope: Scope) -> DirectBody | None:
    """The direct body of an answer whose head is out, if it has one."""
    body = scope.get("extensions", {}).get(_EXTENSION)
    return body if isinstance(body, DirectBody) and body.is_chunked else None
