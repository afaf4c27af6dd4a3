"""The generations behind one HTTP request: started together, followed to the end, and aborted on every way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.api.request_id import current_request
from server.engine.request import (
    Backend,
    FinishReason,
    Generation,
    GenerationRequest,
    RouteInfo,
    TokenLogprob,
    TokenOutput,
)
from server.failure import Failure, RequestFailed

T = TypeVar("T")


@dataclass
class Usage:
    """Token counts of one HTTP request. A prompt that is sampled n times counts once.

    ``draft_steps`` counts the steps that had drafted tokens: the mean accept length is ``1 + accepted / draft_steps``.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    draft_steps: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, output: TokenOutput) -> None:
        self.completion_tokens += len(output.token_ids)
        self.draft_steps += output.n_proposed > 0
        self.proposed += output.n_proposed
        self.accepted += output.n_accepted

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object; with speculation its details, and ``draft_steps`` beside them."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.draft_steps:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.proposed - self.accepted,
                "draft_steps": self.draft_steps,
            }
        return usage


@dataclass
class Answer:
    """All outputs of one generation put together."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    completes_prompt: bool = False

    def add(self, output: TokenOutput) -> None:
        self.text += output.text
        self.completes_prompt |= output.completes_prompt
        self.logprobs.extend(output.logprobs)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


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
    def routes(self) -> list[RouteInfo] | None:
        """Who computed each prompt; None while one of them is not committed here, as far as :meth:`outputs` knows."""
        known = [route for route in self._routes if route is not None]
        return known if len(known) == len(self._routes) else None

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

        n_running, patience_s = len(self._open), first_s
        async with _cancelled_at_the_end([follow(index, generation) for index, generation in self._open.items()]):
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


async def _within(seconds: float | None, queue: asyncio.Queue[T]) -> T | None:
    """The queue's next item; None if nothing comes within ``seconds`` (None: waits for ever)."""
    if seconds is None or not queue.empty():
        return await queue.get()
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


@asynccontextmanager
async def _cancelled_at_the_end(work: Sequence[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Runs ``work`` side by side; whatever is still running at the end of the block is cancelled and waited for."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
