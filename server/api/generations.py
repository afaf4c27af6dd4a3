"""The generations behind one HTTP request: started together, followed to the end, and aborted on every way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.engine.request import (
    Backend,
    FinishReason,
    Generation,
    GenerationRequest,
    RequestFailed,
    RouteInfo,
    TokenLogprob,
    TokenOutput,
)

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
    """One or more running generations. :meth:`abort` must be called when the request is over, whatever has happened."""

    def __init__(self, backend: Backend, requests: Sequence[GenerationRequest]) -> None:
        """Submits all of ``requests``, or none if one of them is refused.

        :raises RequestFailed: the backend's refusal.
        """
        self._open: dict[int, Generation] = {}
        try:
            for index, request in enumerate(requests):
                self._open[index] = backend.submit(request)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Aborts what has not come to its end by itself. May be called more than once."""
        while self._open:
            self._open.popitem()[1].abort()

    async def routes(self) -> list[RouteInfo]:
        """Waits until every prompt is computed and committed here. Raises the first :class:`RequestFailed`."""
        async with _cancelled_at_the_end([g.route() for g in self._open.values()]) as tasks:
            return await asyncio.gather(*tasks)

    async def outputs(self) -> AsyncGenerator[tuple[int, TokenOutput]]:
        """Every generation's outputs with its index, as they come, until all have ended. Close it after use.

        :raises RequestFailed: one of them failed, was aborted, or stopped without a finish reason.
        """
        queue: asyncio.Queue[tuple[int, TokenOutput] | BaseException | None] = asyncio.Queue(maxsize=len(self._open))

        async def follow(index: int, generation: Generation) -> None:
            try:
                async for output in _to_the_end(generation):
                    await queue.put((index, output))
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - raised again by the reader below
                await queue.put(error)

        n_running = len(self._open)
        async with _cancelled_at_the_end([follow(index, generation) for index, generation in self._open.items()]):
            while n_running:
                item = await queue.get()
                if item is None:
                    n_running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    if item[1].finish_reason is not None:
                        self._open.pop(item[0], None)
                    yield item


async def _to_the_end(generation: Generation) -> AsyncIterator[TokenOutput]:
    async for output in generation:
        if output.finish_reason is FinishReason.ABORT:
            raise RequestFailed("aborted", "The server gave this request up before it was finished.", status=503)
        yield output
        if output.finish_reason is not None:
            return
    raise RequestFailed("incomplete", "The generation ended without a finish reason.", status=500)


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
