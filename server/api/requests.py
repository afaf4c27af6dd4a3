"""From a checked request to its response: the part that text and chat completions share."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import xxhash
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from server.api.errors import InvalidRequest
from server.api.generations import Answer, Generations, Usage
from server.api.request_id import request_id
from server.api.routed_rooms import MAX_GENERATIONS, routed_rooms
from server.api.schemas import GenerationFields
from server.api.streaming import EventStream, StreamTimes, until_disconnect
from server.engine.request import (
    PREFILL_ROLE,
    Backend,
    FinishReason,
    GenerationRequest,
    RoutedRoom,
    RouteInfo,
    SamplingParams,
    TokenOutput,
)
from server.failure import RequestFailed

T = TypeVar("T")


class ChoiceWriter(Protocol):
    """How one kind of completion spells its choices. Holds the state of one response."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """The whole answer of generation ``index``."""
        ...

    def chunk_choices(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        """The next streamed choices of generation ``index``, one for each chunk; none if there is nothing to tell."""
        ...


@dataclass(frozen=True)
class Envelope:
    """What all chunks of one response have in common."""

    id: str
    created: int
    model: str

    def wrap(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def check_model(backend: Backend, model: str | None) -> None:
    """:raises InvalidRequest: 404, ``model`` is not the one that is served. None means whichever is."""
    if model is not None and model != backend.model_name:
        raise InvalidRequest(
            "model",
            f"The model {model!r} does not exist: this server serves {backend.model_name!r}.",
            code="model_not_found",
        )


async def serve(
    request: Request,
    backend: Backend,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    writer: ChoiceWriter,
    *,
    prompt_field: str,
) -> Response:
    """Generates ``n`` samples for each of ``prompts`` (token ids) and answers whole or as a stream.

    The headers of the answer name the prefill node and the rooms. What fails before the head is out is a status code:
    a stream's head waits for the first token of any sample, but not for long (:class:`~.streaming.StreamTimes`). If a
    prompt is still not committed then, the headers say nothing of it. A stream's last chunk tells what headers can, in
    ``pd``. Only a stream whose room a router named, on a decode node, always fails as an error event: routers cut short
    the body of any other status.

    A prefill node's stream has an end when its head has to go out, with the tokens that there are: routers read it to
    its end before they relay anything of the decode node's, and the rooms go on without it.
    """
    envelope = Envelope(id=f"{writer.id_prefix}{request_id()}", created=int(time.time()), model=backend.model_name)
    requests = _requests(backend, body, prompts, envelope.id, prompt_field)
    usage = Usage(prompt_tokens=sum(len(ids) for ids in prompts))
    generations = Generations(backend, requests)
    is_at_prefill = backend.role == PREFILL_ROLE
    try:
        if body.stream:
            times: StreamTimes = request.app.state.stream_times
            items, on_end = generations.outputs_and_pauses(times.head_s, times.comment_s), generations.abort
            if is_at_prefill:
                items, on_end = _first_tokens(generations, len(requests), times.head_s), _nothing
            first = await until_disconnect(request.receive, anext(items))
            headers = _route_headers(generations.routes)
            chunks = Chunks(generations, len(requests), body, writer, envelope, usage, times.comment_s)
            return EventStream(chunks.made_of(first, items), headers=headers, on_end=on_end)
        answers = await until_disconnect(request.receive, _collect(generations, len(requests), usage))
    except RequestFailed as failure:
        generations.abort()
        if not body.stream or requests[0].routed is None or is_at_prefill:
            raise
        return EventStream(_only(failure), headers={}, on_end=generations.abort)
    except BaseException:
        generations.abort()
        raise
    headers = _route_headers(generations.routes)
    choices = [writer.choice(index, answer) for index, answer in enumerate(answers)]
    content = envelope.wrap(writer.object_name, choices) | {"usage": usage.as_dict(), "pd": pd_object(headers)}
    return JSONResponse(content, headers=headers)


def check_shape(backend: Backend, body: GenerationFields, n_prompts: int) -> list[RoutedRoom | None]:
    """Checks how many generations there are and where they may run, which costs nothing, and returns their rooms.

    It comes before anything that looks at the prompts: a prefill node may not even read a request without a room.

    :raises InvalidRequest: names the field that is wrong.
    """
    n_generations = n_prompts * body.n_samples
    if n_generations > MAX_GENERATIONS:
        raise InvalidRequest("n", f"{n_generations} generations (prompts times n) are more than {MAX_GENERATIONS}.")
    for token_id in body.stop_token_ids or ():
        check_token_id(backend, token_id, "stop_token_ids")
    return routed_rooms(
        body.bootstrap_host,
        body.bootstrap_port,
        body.bootstrap_room,
        n_prompts=n_prompts,
        n_samples=body.n_samples,
        on_prefill=backend.role == PREFILL_ROLE,
    )


def _requests(
    backend: Backend, body: GenerationFields, prompts: Sequence[Sequence[int]], response_id: str, prompt_field: str
) -> list[GenerationRequest]:
    """One request for every sample of every prompt, samples of one prompt side by side."""
    rooms = check_shape(backend, body, len(prompts))
    requests: list[GenerationRequest] = []
    for ids in prompts:
        sampling = _fit_context(backend, body, len(ids), prompt_field)
        prompt_ids = tuple(ids)  # one for all samples
        for sample in range(body.n_samples):
            seed = None if sampling.seed is None else sample_seed(sampling.seed, sample)
            sample_id = f"{response_id}-{len(requests)}"
            named = rooms[len(requests)]
            requests.append(GenerationRequest(sample_id, prompt_ids, replace(sampling, seed=seed), named))
    return requests


def sample_seed(seed: int, sample: int) -> int:
    """The seed (int64) of one sample of a prompt. The first has ``seed`` itself; the others have a hash of it and of
    their index, so that seeds that lie side by side share no samples.
    """
    if sample == 0:
        return seed
    digest = xxhash.xxh3_64_intdigest(struct.pack("<qQ", seed, sample))
    return digest - (1 << 64) if digest >> 63 else digest


def check_token_id(backend: Backend, token_id: int, field: str) -> None:
    """:raises InvalidRequest: names an id that the vocabulary does not have."""
    if not 0 <= token_id < backend.tokenizer.vocab_size:
        raise InvalidRequest(
            field, f"{field}: token id {token_id} is not in the vocabulary (0 to {backend.tokenizer.vocab_size - 1})."
        )


def _fit_context(backend: Backend, body: GenerationFields, n_prompt: int, prompt_field: str) -> SamplingParams:
    """Sampling parameters for a prompt of ``n_prompt`` tokens. The default of max_tokens shrinks to what fits.

    A prefill node generates one token whatever is asked, and the decode node is the judge of the rest.

    :raises InvalidRequest: the prompt is empty, or it or the asked max_tokens does not fit the context.
    """
    if n_prompt == 0:
        raise InvalidRequest(prompt_field, "The prompt has 0 tokens: it must have at least one.", code="empty_prompt")
    room = backend.max_context - n_prompt
    if room < 1:
        raise InvalidRequest(
            prompt_field,
            f"The prompt has {n_prompt} tokens, but the context is {backend.max_context} tokens including at least one "
            "generated token.",
            code="context_length_exceeded",
        )
    sampling = body.sampling(backend.sampling_defaults)
    if backend.role == PREFILL_ROLE:
        return replace(sampling, max_tokens=1, min_tokens=0)
    if body.asked_max_tokens is not None and body.asked_max_tokens > room:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidRequest(
            field,
            f"{field}: {n_prompt} prompt tokens and {body.asked_max_tokens} tokens to generate do not fit the context "
            f"of {backend.max_context} tokens: at most {room} can be generated.",
            code="context_length_exceeded",
        )
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"min_tokens {sampling.min_tokens} is more than max_tokens {sampling.max_tokens}."
        )
    return sampling


def _route_headers(routes: Sequence[RouteInfo] | None) -> dict[str, str]:
    """``x-pd-prefill``: who computed the prompts (each once); ``x-pd-room``: one room for every generation, if any;
    ``x-pd-draft-state``: with speculation, where the draft's window came from. ``x-pd-retries``: how often a prompt was
    computed by another prefill node because one had failed, if ever. Nothing while that is not known.
    """
    if routes is None:
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


def pd_object(headers: Mapping[str, str]) -> dict[str, str]:
    """What the headers of an answer say, for its body: ``{"request_id", "prefill", "room", ...}``."""
    return {"request_id": request_id()} | {
        name.removeprefix("x-pd-").replace("-", "_"): value for name, value in headers.items()
    }


async def _only(failure: RequestFailed) -> AsyncGenerator[dict[str, Any]]:
    """A stream that has nothing to tell but ``failure``."""
    nothing: tuple[dict[str, Any], ...] = ()
    for chunk in nothing:
        yield chunk
    raise failure


async def _collect(generations: Generations, n_generations: int, usage: Usage) -> list[Answer]:
    answers = [Answer() for _ in range(n_generations)]
    async with aclosing(generations.outputs()) as outputs:
        async for index, output in outputs:
            answers[index].add(output)
            usage.add(output)
    return answers


async def _first_tokens(
    generations: Generations, n_generations: int, within_s: float
) -> AsyncGenerator[tuple[int, TokenOutput] | None]:
    """What a prefill node answers: the token of every generation, and of those that have none ``within_s`` the end."""
    found: dict[int, TokenOutput] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s), aclosing(generations.outputs()) as outputs:
            async for index, output in outputs:
                found.setdefault(index, output)
    for index in range(n_generations):
        yield index, found.get(index, TokenOutput((), "", finish_reason=FinishReason.LENGTH))


def _nothing() -> None:
    pass


@dataclass
class Chunks:
    """The chunks of one stream. ``n_open`` generations have not ended yet."""

    generations: Generations
    n_open: int
    body: GenerationFields
    writer: ChoiceWriter
    envelope: Envelope
    usage: Usage
    silence_s: float

    async def made_of(
        self, first: tuple[int, TokenOutput] | None, rest: AsyncGenerator[tuple[int, TokenOutput] | None]
    ) -> AsyncGenerator[dict[str, Any] | None]:
        """The chunks for these outputs, and the usage chunk (without choices) where it was asked for. None stands for a
        comment: where nothing came, and where what came had nothing to tell for ``silence_s``.
        """
        told = time.monotonic()
        async with aclosing(rest):
            async for item in _all(first, rest):
                chunks = [] if item is None else self._chunks(*item)
                for chunk in chunks:
                    yield chunk
                if not chunks:
                    if item is not None and time.monotonic() - told < self.silence_s:
                        continue
                    yield None
                told = time.monotonic()
        if self._includes_usage:
            last = self.envelope.wrap(self.writer.chunk_object_name, [])
            yield last | {"usage": self.usage.as_dict(), "pd": self._pd()}

    def _chunks(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        self.usage.add(output)
        choices = self.writer.chunk_choices(index, output)
        chunks = [self.envelope.wrap(self.writer.chunk_object_name, [choice]) for choice in choices]
        options = self.body.stream_options
        is_continuous = options is not None and bool(options.continuous_usage_stats)
        if self._includes_usage or is_continuous:
            for chunk in chunks:
                chunk["usage"] = self.usage.as_dict() if is_continuous else None
        self.n_open -= output.finish_reason is not None
        if not self.n_open and not self._includes_usage:
            chunks[-1]["pd"] = self._pd()
        return chunks

    @property
    def _includes_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def _pd(self) -> dict[str, str]:
        return pd_object(_route_headers(self.generations.routes))


async def _all(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    yield first
    async for item in rest:
        yield item
