"""A running generation as the HTTP layer sees it: outputs that the node gives to whoever listens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.request import FinishReason, RouteInfo, TokenOutput
from server.failure import Failure, RequestFailed


class NodeGeneration:
    """One request's answer. All methods run in the event loop; ``on_abort`` is called once, on the first ``abort``.

    What comes goes straight to the listener (:meth:`listen`), in the call that brings it; until there is one it is kept
    here. ``on_end`` is called once, at the end, with the finish reason, or with the code of a failure and the failure.
    Failures get ``room``.
    """

    def __init__(
        self,
        on_abort: Callable[[], None],
        *,
        room: int | None = None,
        on_end: Callable[[str, Failure | None], None] | None = None,
    ) -> None:
        self._on_abort = on_abort
        self._on_end = on_end
        self._room = room
        self._unheard: deque[TokenOutput | RequestFailed] = deque()
        self._on_item: Callable[[TokenOutput | RequestFailed], object] = self._unheard.append
        self._routed = asyncio.Event()
        self._failure: RequestFailed | None = None
        self._abort_asked = False
        self.known_route: RouteInfo | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        """For the next output."""
        self.ended = False

    def listen(self, on_item: Callable[[TokenOutput | RequestFailed], object]) -> None:
        """From now on ``on_item`` gets every output, and a failure that ends them; first what has come already."""
        self._on_item = on_item
        while self._unheard:
            on_item(self._unheard.popleft())

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        """The outputs, once, for whoever would rather wait than listen. Raises the :class:`RequestFailed` that ends
        them.
        """
        items: asyncio.Queue[TokenOutput | RequestFailed] = asyncio.Queue()
        self.listen(items.put_nowait)
        while True:
            item = await items.get()
            if isinstance(item, RequestFailed):
                raise item
            yield item
            if item.finish_reason is not None:
                return

    async def route(self) -> RouteInfo:
        """Waits until the prompt is computed and committed. Raises :class:`RequestFailed`."""
        await self._routed.wait()
        if self.known_route is None:
            raise self._failure or RequestFailed(Failure("aborted", "the request was aborted before it was computed"))
        return self.known_route

    def abort(self) -> None:
        """Ends the generation; may be called at any time and more than once."""
        if not self.ended and not self._abort_asked:
            self._abort_asked = True
            self._on_abort()

    def set_route(self, route: RouteInfo) -> None:
        """The prompt's state is committed here."""
        if self.known_route is None:
            self.known_route = route
            self._routed.set()

    def put(self, output: TokenOutput) -> None:
        """Gives an output out; one with a finish reason is the last."""
        if not self.ended:
            if self.prompt_logprobs is not None:
                output = msgspec.structs.replace(output, prompt_logprobs=self.prompt_logprobs)
                self.prompt_logprobs = None
            self._on_item(output)
            if output.finish_reason is not None:
                self._end(output.finish_reason.value)

    def finish(self, reason: FinishReason) -> None:
        """Ends the outputs, if none has done so."""
        self.put(TokenOutput((), "", finish_reason=reason))

    def fail(self, failure: RequestFailed) -> None:
        """Ends the outputs with an error, if they have not ended."""
        if not self.ended:
            if failure.room is None:
                failure.room = self._room
            self._failure = failure
            self._end(failure.code, failure.failure)
            self._on_item(failure)

    def _end(self, outcome: str, failure: Failure | None = None) -> None:
        self.ended = True
        self._routed.set()
        if self._on_end is not None:
            self._on_end(outcome, failure)
