"""From a checked request to its response: the part that text and chat completions share."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import xxhash
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from server.api.answers import Answer, Writer, n_logprobs
from server.api.chunks import Chunks, StreamChunks, event, pd_object
from server.api.errors import InvalidRequest, failure_body
from server.api.generations import Generations
from server.api.lanes import Lane
from server.api.prompt_logprobs import INLINE_ENTRIES, n_entries
from server.api.request_id import request_id
from server.api.routed_rooms import MAX_GENERATIONS, routed_rooms
from server.api.rules import Rules
from server.api.schemas import GenerationFields, StreamOptions
from server.api.streaming import EventStream, LiveStream, StreamTimes, until_disconnect
from server.api.tokenizing import check_prompt_length, check_token_id
from server.engine.prompt_logprobs import answers_over_limit, most_answer_tokens, over_limit
from server.engine.request import (
    PREFILL_ROLE,
    Backend,
    FinishReason,
    GenerationRequest,
    RoutedRoom,
    SamplingParams,
    TokenOutput,
)
from server.failure import RequestFailed


def check_model(backend: Backend, model: str | None) -> None:
    """:raises InvalidRequest: 404, ``model`` is not the one that is served. None means whichever is."""
    if model is not None and model != backend.model_name:
        raise InvalidRequest(
            "model",
            f"The model {model!r} does not exist: this server serves {backend.model_name!r}.",
            code="model_not_found",
        )


def check_request(backend: Backend, body: GenerationFields, n_prompts: int) -> list[RoutedRoom | None]:
    """Checks the model, how many generations there are and where they may run, which costs nothing; returns the room
    of each generation.

    It comes before anything that looks at the prompts: a prefill node may not even read a request without a room.

    :raises InvalidRequest: names the field that is wrong.
    """
    check_model(backend, body.model)
    n_generations = n_prompts * body.n_generated
    if n_generations > MAX_GENERATIONS:
        raise InvalidRequest("n", f"{n_generations} generations (prompts times n) are more than {MAX_GENERATIONS}.")
    _check_logprobs(backend, body, n_generations)
    for field, token_ids in {"stop_token_ids": body.stop_token_ids or (), **body.named_token_ids}.items():
        for token_id in token_ids:
            check_token_id(token_id, backend.tokenizer.vocab_size, field)
    return routed_rooms(
        body.bootstrap_host,
        body.bootstrap_port,
        body.bootstrap_room,
        n_prompts=n_prompts,
        n_samples=body.n_generated,
        on_prefill=backend.role == PREFILL_ROLE,
    )


def _check_logprobs(backend: Backend, body: GenerationFields, n_generations: int) -> None:
    """:raises InvalidRequest: the answers may come to more log probabilities than are kept and spelled."""
    n_top, asked = body.n_kept_logprobs, body.asked_max_tokens
    if n_top is None or asked is None:
        return
    reason = answers_over_limit(min(asked, backend.max_context), n_top, n_generations)
    if reason is not None:
        raise InvalidRequest(body.logprobs_field, reason)


async def serve(
    request: Request,
    backend: Backend,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    rooms: Sequence[RoutedRoom | None],
    writer: Writer,
    rules: Rules,
    *,
    prompt_field: str,
    make_chunks: Callable[[Generations], StreamChunks] | None = None,
) -> Response:
    """Generates ``n`` samples for each of ``prompts`` (token ids) and answers whole or as a stream, whose chunks are
    OpenAI's unless ``make_chunks`` says else.

    The headers of the answer name the prefill node and the rooms. What fails before the head is out is a status code:
    a stream's head waits for the first token of any sample, but not for long (:class:`~.streaming.StreamTimes`). If a
    prompt is still not committed then, the headers say nothing of it. A stream's last chunk says the same in ``pd``.
    Only a stream whose room a router chose, on a decode node, always fails as an error event: routers cut short the
    body of any other status.

    A prefill node's stream has an end when its head has to go out, with the tokens that there are: routers read it to
    its end before they relay anything of the decode node's, and the rooms go on without it.
    """
    requests = _generation_requests(backend, body, prompts, rooms, rules, writer.id, prompt_field)
    generations = Generations(backend, requests, n_samples=body.n_generated)
    is_at_prefill = backend.role == PREFILL_ROLE
    lane: Lane = request.app.state.answers_lane
    try:
        if not body.stream:
            answers = await until_disconnect(request.receive, _collect(generations, writer))
            headers = generations.route_headers
            pd = pd_object(request_id(), headers)
            spell = partial(_respond, writer, best_answers(answers, body), pd, headers)
            size = n_entries(answer.prompt_logprobs for answer in answers)
            size += sum(n_logprobs(answer.logprobs) for answer in answers)
            size += writer.n_repeated
            return spell() if size <= INLINE_ENTRIES else await until_disconnect(request.receive, lane.run(size, spell))
        times: StreamTimes = request.app.state.stream_times
        chunks: StreamChunks = (
            Chunks(writer, body.stream_options or StreamOptions(), generations)
            if make_chunks is None
            else make_chunks(generations)
        )
        if is_at_prefill:
            outputs = await until_disconnect(request.receive, _first_tokens(generations, times.head_s))
            events = [event for index, output in outputs for event in chunks.events(index, output)]
            return EventStream([*events, *chunks.end()], headers=generations.route_headers)
        await until_disconnect(request.receive, generations.wait(times.head_s))
        long_lane = lane if chunks.may_be_long(requests[0].sampling) else None
        return LiveStream(generations, chunks, times.comment_s, headers=generations.route_headers, lane=long_lane)
    except BaseException as error:
        generations.abort()
        is_event = body.stream and requests[0].routed is not None and not is_at_prefill
        if is_event and isinstance(error, RequestFailed):
            return EventStream([event(failure_body(error))])
        raise


def _respond(
    writer: Writer, answers: Sequence[Answer], pd: Mapping[str, str], headers: Mapping[str, str]
) -> JSONResponse:
    return JSONResponse(writer.whole(answers, pd), headers=dict(headers))


def _generation_requests(
    backend: Backend,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    rooms: Sequence[RoutedRoom | None],
    rules: Rules,
    response_id: str,
    prompt_field: str,
) -> list[GenerationRequest]:
    """One request for every sample of every prompt, samples of one prompt side by side."""
    requests: list[GenerationRequest] = []
    group = response_id if len(prompts) * body.n_generated > 1 else ""
    reason = over_limit(sum(map(len, prompts)), body.n_prompt_logprobs, body.n_generated)
    if reason is not None:
        raise InvalidRequest(body.prompt_logprobs_field, reason)
    for ids in prompts:
        sampling = _fit_context(backend, body, len(ids), prompt_field)
        if sampling.logprobs is not None and body.asked_max_tokens is None:
            most = most_answer_tokens(sampling.logprobs, len(prompts) * body.n_generated)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, most))
        sampling = replace(sampling, bad_words=rules.bad_words, grammar=rules.grammar)
        prompt_ids = tuple(ids)  # one for all samples
        for sample in range(body.n_generated):
            seed = None if sampling.seed is None else sample_seed(sampling.seed, sample)
            index = len(requests)
            sample_id = f"{response_id}-{index}"
            sampled = replace(sampling, seed=seed)
            request = GenerationRequest(sample_id, prompt_ids, sampled, rooms[index], group=group, cache_salt=body.salt)
            requests.append(request)
    return requests


def sample_seed(seed: int, sample: int) -> int:
    """The seed (int64) of one sample of a prompt. The first has ``seed`` itself; the others have a hash of it and of
    their index, so that seeds that lie side by side share no samples.
    """
    if sample == 0:
        return seed
    digest = xxhash.xxh3_64_intdigest(struct.pack("<qQ", seed, sample))
    return digest - (1 << 64) if digest >> 63 else digest


def _fit_context(backend: Backend, body: GenerationFields, n_prompt: int, prompt_field: str) -> SamplingParams:
    """Sampling parameters for a prompt of ``n_prompt`` tokens. The default of max_tokens shrinks to what fits.

    A prefill node generates one token whatever is asked, and the decode node checks the rest. The log probabilities of
    the prompt are in the decode node's answer, to which they are handed over.

    :raises InvalidRequest: the prompt is empty, or it or the asked max_tokens does not fit the context.
    """
    if n_prompt == 0:
        raise InvalidRequest(prompt_field, "The prompt has 0 tokens: it must have at least one.", code="empty_prompt")
    check_prompt_length(n_prompt, backend.max_context, prompt_field)
    room = backend.max_context - n_prompt
    sampling = body.sampling(backend.sampling_defaults)
    if backend.role == PREFILL_ROLE:
        return replace(sampling, max_tokens=min(1, sampling.max_tokens), min_tokens=0, prompt_logprobs=None)
    if body.asked_max_tokens is not None and body.asked_max_tokens > room:
        field = body.max_tokens_field
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


def best_answers(answers: Sequence[Answer], body: GenerationFields) -> Sequence[Answer]:
    """Of the answers to each prompt the ``n_samples`` with the largest sum of log probabilities, the best first."""
    if body.n_generated == body.n_samples:
        return answers
    best: list[Answer] = []
    for first in range(0, len(answers), body.n_generated):
        ranked = sorted(
            answers[first : first + body.n_generated], key=lambda answer: -sum(each.logprob for each in answer.logprobs)
        )
        best += ranked[: body.n_samples]
    return [replace(answer, logprobs=[]) for answer in best] if body.n_logprobs is None else best


async def _collect(generations: Generations, writer: Writer) -> list[Answer]:
    answers = [writer.answer() for _ in range(len(generations))]

    def add_waiting() -> None:
        while (item := generations.take()) is not None:
            index, output = item
            answers[index].add(output)
            writer.usage.add(output)

    with generations.read_by(add_waiting):
        while not generations.is_over:
            await generations.wait()
    for index, answer in enumerate(answers):
        answer.cached_tokens = generations.cached_tokens_of(index)
    writer.usage.cached_tokens = generations.cached_tokens
    return answers


async def _first_tokens(generations: Generations, within_s: float) -> list[tuple[int, TokenOutput]]:
    """What a prefill node answers: the token of every generation, and of those that have none ``within_s`` the end."""
    found: dict[int, TokenOutput] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not generations.is_over:
                await generations.wait()
                while (item := generations.take()) is not None:
                    found.setdefault(*item)
    nothing = TokenOutput((), "", finish_reason=FinishReason.LENGTH)
    return [(index, found.get(index, nothing)) for index in range(len(generations))]
