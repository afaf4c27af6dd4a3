"""What a decode node takes on: the checks that refuse a request at once, and the form it has on the wire."""

from __future__ import annotations

import secrets
from collections.abc import Container
from dataclasses import replace

import msgspec
import numpy as np

from server.cache.allocator import Allocator
from server.cache.handoff import packed_prompt_hash
from server.engine.prompt_logprobs import over_limit
from server.engine.request import GenerationRequest, SamplingParams
from server.failure import Failure, RequestFailed
from server.transfer.protocol import MAX_ROOM, RoomRequest, RoutedRequest, Sampling


def check_request(
    request: GenerationRequest,
    *,
    max_context: int,
    vocab_size: int,
    spec_tokens: int,
    allocator: Allocator,
    is_local: bool,
) -> None:
    """Refuses what can never be served. Raises :class:`RequestFailed` with the numbers that do not fit."""
    n, max_new = len(request.prompt_ids), request.sampling.max_tokens
    if n == 0:
        raise RequestFailed(Failure("empty_prompt", "the prompt is empty: it needs at least one token"))
    if max_new < 0:
        raise RequestFailed(Failure("bad_max_tokens", f"max_tokens must not be negative, got {max_new}"))
    if (reason := over_limit(n, request.sampling.prompt_logprobs)) is not None:
        raise RequestFailed(Failure("bad_sampling", reason))
    if n + max_new > max_context:
        message = (
            f"the prompt has {n} tokens and max_tokens is {max_new}: {n + max_new} is over the context of {max_context}"
        )
        raise RequestFailed(Failure("context_length_exceeded", message))
    needed = tokens_held(request, spec_tokens, is_local=is_local)
    if needed > allocator.capacity_tokens:
        message = (
            f"the prompt's {n} tokens and max_tokens {max_new} need {needed} positions, but the whole page pool holds "
            f"{allocator.capacity_tokens}: shorten the prompt or lower max_tokens"
        )
        raise RequestFailed(Failure("context_length_exceeded", message))
    ids = np.asarray(request.prompt_ids)  # in the event loop, for up to 256 prompts at once: a Python loop is too slow
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = next(i for i in request.prompt_ids if not 0 <= i < vocab_size)
        raise RequestFailed(Failure("bad_token", f"token id {wrong} is not in the vocabulary of {vocab_size}"))


def choose_room(request: GenerationRequest, room: int | None, taken: Container[int]) -> int:
    """The room's id: the one that the request names, else ``room``, else one that is drawn.

    Raises :class:`RequestFailed` for one that is none, and for one of ``taken``.
    """
    if request.routed is not None:
        room = request.routed.room
    if room is None:
        room = secrets.randbits(63)
    if not 0 <= room <= MAX_ROOM:
        raise RequestFailed(Failure("bad_room", f"room {room} is not in 0 .. {MAX_ROOM}"))
    if room in taken:
        raise RequestFailed(Failure("duplicate_room", f"room {room} is in use by another request"))
    return room


def wire_sampling(sampling: SamplingParams) -> Sampling:
    """Raises :class:`RequestFailed` for a parameter that the wire refuses."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RequestFailed(Failure("bad_sampling", f"a sampling parameter is out of range: {error}")) from error


def wire_request(request: GenerationRequest, prompt: bytes, sampling: Sampling) -> RoomRequest | RoutedRequest:
    """The request as a prefill node gets it: without the packed ``prompt`` if a router sends it that."""
    request_id, salt = request.request_id[:256], request.cache_salt
    if request.routed is not None:
        return RoutedRequest(request_id, len(request.prompt_ids), packed_prompt_hash(prompt), sampling, salt)
    return RoomRequest(request_id, prompt, sampling, salt)


def tokens_held(request: GenerationRequest, spec_tokens: int, *, is_local: bool) -> int:
    """Positions a request may ever write here: prompt, answer, and the draft tokens of its last step. Where a prefill
    node computes the prompt and nothing is to be decoded, its hand-off row is all that comes, and the slot is for that.
    """
    if not request.sampling.max_tokens and not is_local:
        return 1
    return len(request.prompt_ids) + request.sampling.max_tokens + spec_tokens


def with_seed(request: GenerationRequest) -> GenerationRequest:
    """The request with a seed drawn here if the client gave none: both nodes must draw the same numbers."""
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
