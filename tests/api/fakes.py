"""A backend without a model: it answers with a fixed text, through the real tokenizer and output processor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.request import (
    FinishReason,
    GenerationRequest,
    RouteInfo,
    SamplingParams,
    TokenizerLike,
    TokenLogprob,
    TokenOutput,
)
from server.engine.stopping import OutputProcessor
from server.engine.tokenizer import Tokenizer
from server.failure import Failure, RequestFailed
from tests.support.fake_scores import rows_of

ANSWER = "Tom has 42 äpfel 🦊"
KEPT_ROOM = 2**63 - 1


@dataclass
class Script:
    """What the next generations do."""

    answer: str = ANSWER
    answer_ids: list[int] | None = None
    """Instead of ``answer``."""
    refuse: Exception | None = None
    refuse_from: int = 0
    """Index of the first submitted request that is refused."""
    route_error: RequestFailed | None = None
    n_retries: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    """Generations, and how many tokens of their prompts were found in a cache."""
    fail_after: int | None = None
    """Number of tokens after which the generation raises ``failure``."""
    failure: RequestFailed = field(
        default_factory=lambda: RequestFailed(Failure("engine_error", "the room failed", "swa"))
    )
    hang_after: int | None = None
    waiting: set[int] = field(default_factory=set)
    """Generations, in the order of their submission, whose prompts are not computed as long as they are in here."""
    failing: dict[int, RequestFailed] = field(default_factory=dict)
    """Generations whose prompts fail."""
    step_s: float = 0.0
    tokens_a_step: int = 1
    end: str = "eos"
    """``eos``; or ``abort``: the server gives up."""


class FakeGeneration:
    """Plays its script in a task, from the moment on that somebody listens."""

    def __init__(
        self, request: GenerationRequest, script: Script, tokenizer: Tokenizer, room: int | None, number: int
    ) -> None:
        self.request = request
        self.number = number
        self.script = script
        self.tokenizer = tokenizer
        self.room = room
        self.known_route: RouteInfo | None = None
        self.aborted = False
        self.ended = False
        self._has_spoken = False
        self._playing: asyncio.Task[None] | None = None

    def listen(self, on_item: Callable[[TokenOutput | RequestFailed], object]) -> None:
        self._playing = asyncio.create_task(self._play(on_item))

    def abort(self) -> None:
        self.aborted = True
        if self._playing is not None:
            self._playing.cancel()

    async def _play(self, on_item: Callable[[TokenOutput | RequestFailed], object]) -> None:
        try:
            self.known_route = await self._route()
            async for output in self._outputs():
                self.ended = output.finish_reason not in (None, FinishReason.ABORT)
                if (n_top := self.request.sampling.prompt_logprobs) is not None and not self._has_spoken:
                    found = PromptLogprobs(n_top, rows_of(self.request.prompt_ids, n_top))
                    output = msgspec.structs.replace(output, prompt_logprobs=found)
                self._has_spoken = True
                on_item(output)
        except RequestFailed as failure:
            on_item(failure)

    async def _route(self) -> RouteInfo:
        await asyncio.sleep(0)
        while self.number in self.script.waiting:  # noqa: ASYNC110 - tests let them go from another thread
            await asyncio.sleep(0.005)
        if self.number in self.script.failing:
            raise self.script.failing[self.number]
        if self.script.route_error is not None:
            raise self.script.route_error
        return RouteInfo(
            "local" if self.room is None else "10.0.0.1:8998",
            self.room,
            n_retries=self.script.n_retries,
            cached_tokens=self.script.cached.get(self.number, 0),
        )

    async def _outputs(self) -> AsyncIterator[TokenOutput]:
        if not self.request.sampling.max_tokens:
            yield TokenOutput((), "", finish_reason=FinishReason.LENGTH)
            return
        processor = OutputProcessor(self.tokenizer, self.request.sampling, self.request.prompt_ids)
        ids = self.script.answer_ids
        ids = [*(self.tokenizer.encode(self.script.answer)[1:] if ids is None else ids), 1]
        for n_done in range(0, len(ids), self.script.tokens_a_step):
            await asyncio.sleep(self.script.step_s)
            if self.script.hang_after is not None and n_done >= self.script.hang_after:
                await asyncio.Event().wait()
            if self.script.fail_after is not None and n_done >= self.script.fail_after:
                raise self.script.failure
            step = ids[n_done : n_done + self.script.tokens_a_step]
            if step[-1] == 1 and self.script.end == "abort":
                yield TokenOutput((), "", finish_reason=FinishReason.ABORT)
                return
            output = processor.feed(step, [self._logprob(i) for i in step])
            assert output is not None
            yield output
            if output.finish_reason is not None:
                return

    def _logprob(self, token_id: int) -> TokenLogprob:
        n_top = self.request.sampling.logprobs or 0
        return TokenLogprob(token_id, -0.5, tuple((10 + i, -1.0 - i if i else float("-inf")) for i in range(n_top)))


class FakeBackend:
    model_name = "tiny"
    max_context = 256

    def __init__(self, tokenizer: Tokenizer, role: str = "decode") -> None:
        self.role = role
        self.tokenizer: TokenizerLike = tokenizer
        self._real_tokenizer = tokenizer
        self.sampling_defaults = SamplingParams(max_tokens=64)
        self.script = Script()
        self.health: tuple[bool, str] = (True, "running")
        self.readiness: tuple[bool, str] = (True, "probe answered")
        self.first_room: int | None = 2**62 + 1
        self.generations: list[FakeGeneration] = []
        self.n_cached_pages = 3

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.script.refuse is not None and len(self.generations) >= self.script.refuse_from:
            raise self.script.refuse
        room = None if self.first_room is None else self.first_room + len(self.generations)
        generation = FakeGeneration(request, self.script, self._real_tokenizer, room, len(self.generations))
        self.generations.append(generation)
        return generation

    def alive(self) -> tuple[bool, str]:
        return self.health

    async def ready(self) -> tuple[bool, str]:
        return self.readiness

    def server_info(self) -> dict[str, Any]:
        return {"model_path": "/models/tiny", "architectures": ["DeepseekV4ForCausalLM"], "pages": 64}

    def rooms(self, limit: int) -> dict[str, Any]:
        return {"node": self.role, "limit": limit}

    def room(self, room: int) -> dict[str, Any] | None:
        return {"room": str(room)} if room == KEPT_ROOM else None

    def state(self) -> dict[str, Any]:
        return {"node": self.role}

    def flush_cache(self) -> int:
        n_pages, self.n_cached_pages = self.n_cached_pages, 0
        return n_pages

    def load(self) -> dict[str, int]:
        return {
            "num_reqs": len(self.generations),
            "num_waiting_reqs": 0,
            "num_tokens": 512,
            "max_total_num_tokens": 2048,
            "max_running_requests": 8,
        }

    @property
    def requests(self) -> list[GenerationRequest]:
        return [generation.request for generation in self.generations]

    def all_over(self) -> bool:
        """Whether no generation was left running: each has ended by itself or was aborted."""
        return all(generation.ended or generation.aborted for generation in self.generations)
