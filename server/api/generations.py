"""The generations behind one HTTP request: started together, followed to the end, and aborted with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar

from server.api.request_id import current_request
from server.engine.request import (
    Backend,
    FinishReason,
    Generation,
    GenerationRequest,
    RouteInfo,
    TokenOutput,
)
from server.failure import Failure, RequestFailed

T = TypeVar("T")


class Generations:
    """One or more running generations. :meth:`abort` must be called when the request is over, whatever has happened.

    What a client is slow to read waits in each generation: at most its whole answer, while the connection lasts.
    """

    def __init__(self, backend: Backend, requests: Sequence[GenerationRequest]) -> None:
        """Submits all of ``requests``, or none if one of them is refused.

        :raises RequestFailed: the backend's refusal.
        """
        self._open: dict[int, Generation] = {}
        self._routes: list[RouteInfo | None] = [None] * len(requests)
        try:
            for index, request in enumerate(requests):
                self._open[index] = _submit(backend, request)
        except BaseException:
            self.abort()
            raise
        if (http_request := current_request()) is not None:
            http_request.taken_on = True

    def abort(self) -> None:
        """Aborts what has not come to its end by itself. May be called more than once."""
        while self._open:
            self._open.popitem()[1].abort()

    @property
    def route_headers(self) -> dict[str, str]:
        """``x-pd-prefill``: who computed the prompts (each once); ``x-pd-room``: one room for every generation, if any;
        ``x-pd-draft-state``: with speculation, where the draft's window came from. ``x-pd-retries``: how often a prompt
        was computed by another prefill node because one had failed, if ever. Nothing while one of the prompts is not
        committed here, as far as :meth:`outputs` knows.
        """
        routes = [route for route in self._routes if route is not None]
        if len(routes) < len(self._routes):
            return {}
        headers = {"x-pd-prefill": ",".join(dict.fromkeys(route.prefill for route in routes))}
        rooms = [str(route.room) for route in routes if route.room is not None]
        if rooms:
            headers["x-pd-room"] = ",".join(rooms)
        if states := dict.fromkeys(route.draft_state for route in routes if route.draft_state is not None):
            headers["x-pd-draft-state"] = ",".join(states)
        if n_retries := sum(route.n_retries for route in routes):
            headers["x-pd-retries"] = str(n_retries)
        return headers

    async def outputs(self) -> AsyncGenerator[tuple[int, TokenOutput]]:
        """Every generation's outputs with its index, as they come, until all have ended. Close it after use.

        :raises RequestFailed: one of them failed, was aborted, or stopped without a finish reason.
        """
        async with aclosing(self.outputs_and_pauses(None, None)) as items:
            async for item in items:
                if item is not None:
                    yield item

    async def outputs_and_pauses(
        self, first_s: float | None, then_s: float | None
    ) -> AsyncGenerator[tuple[int, TokenOutput] | None]:
        """Like :meth:`outputs`, with None whenever nothing has come for ``then_s`` seconds (at the beginning: for
        ``first_s``).
        """
        queue: asyncio.Queue[tuple[int, TokenOutput | Exception | None]] = asyncio.Queue(maxsize=len(self._open))

        async def follow(index: int, generation: Generation) -> None:
            try:
                self._routes[index] = await generation.route()
                async for output in _to_the_end(generation):
                    await queue.put((index, output))
                await queue.put((index, None))
            except Exception as error:  # noqa: BLE001 - raised again by the reader below
                await queue.put((index, error))

        tasks = [asyncio.create_task(follow(index, generation)) for index, generation in self._open.items()]
        n_running, patience_s = len(tasks), first_s
        try:
            while n_running:
                found = await _within(patience_s, queue)
                patience_s = then_s
                if found is None:
                    yield None
                    continue
                index, output = found
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    n_running -= 1
                    continue
                if output.finish_reason is not None:
                    self._open.pop(index, None)
                yield index, output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _within(seconds: float | None, queue: asyncio.Queue[T]) -> T | None:
    """The queue's next item; None if nothing comes within ``seconds`` (None: waits for ever)."""
    try:
        async with asyncio.timeout(seconds):
            return await queue.get()
    except TimeoutError:
        return None


def _submit(backend: Backend, request: GenerationRequest) -> Generation:
    try:
        return backend.submit(request)
    except RequestFailed as failure:
        if request.routed is not None:
            failure.room = request.routed.room
        raise


async def _to_the_end(generation: Generation) -> AsyncIterator[TokenOutput]:
    async for output in generation:
        if output.finish_reason is FinishReason.ABORT:
            raise RequestFailed(Failure("aborted", "The server gave this request up before it was finished."))
        yield output
        if output.finish_reason is not None:
            return
    raise RequestFailed(Failure("incomplete", "The generation ended without a finish reason."))
