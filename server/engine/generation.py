"""A running generation as the HTTP layer sees it: a stream of outputs that the node fills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from server.engine.request import FinishReason, RouteInfo, TokenOutput
from server.failure import Failure, RequestFailed


class NodeGeneration:
    """One request's answer. All methods run in the event loop; ``on_abort`` is called once, on the first ``abort``.

    ``on_end`` is called once, at the end, with the finish reason or the code of the failure. Failures get ``room``.
    """

    def __init__(
        self,
        on_abort: Callable[[], None],
        *,
        room: int | None = None,
        on_end: Callable[[str], None] | None = None,
    ) -> None:
        self._on_abort = on_abort
        self._on_end = on_end
        self._room = room
        self._outputs: asyncio.Queue[TokenOutput | None] = asyncio.Queue()
        self._routed = asyncio.Event()
        self._route: RouteInfo | None = None
        self._failure: RequestFailed | None = None
        self.ended = False
        self._abort_asked = False

    def __aiter__(self) -> AsyncIterator[TokenOutput]:
        return self._stream()

    async def _stream(self) -> AsyncIterator[TokenOutput]:
        while (output := await self._outputs.get()) is not None:
            yield output
        self._outputs.put_nowait(None)
        if self._failure is not None:
            raise self._failure

    async def route(self) -> RouteInfo:
        """Waits until the prompt is computed and committed. Raises :class:`RequestFailed`."""
        await self._routed.wait()
        if self._route is None:
            raise self._failure or RequestFailed(Failure("aborted", "the request was aborted before it was computed"))
        return self._route

    def abort(self) -> None:
        """Ends the generation; may be called at any time and more than once."""
        if not self.ended and not self._abort_asked:
            self._abort_asked = True
            self._on_abort()

    def set_route(self, route: RouteInfo) -> None:
        """The prompt's state is committed here."""
        if self._route is None:
            self._route = route
            self._routed.set()

    def put(self, output: TokenOutput) -> None:
        """Adds an output; one with a finish reason is the last."""
        if not self.ended:
            self._outputs.put_nowait(output)
            if output.finish_reason is not None:
                self._end(output.finish_reason.value)

    def finish(self, reason: FinishReason) -> None:
        """Ends the stream, if no output has done so."""
        self.put(TokenOutput((), "", finish_reason=reason))

    def fail(self, failure: RequestFailed) -> None:
        """Ends the stream with an error, if it has not ended."""
        if not self.ended:
            if failure.room is None:
                failure.room = self._room
            self._failure = failure
            self._end(failure.code)

    def _end(self, outcome: str) -> None:
        self.ended = True
        self._outputs.put_nowait(None)
        self._routed.set()
        if self._on_end is not None:
            self._on_end(outcome)
