"""What a decode node takes on: the checks that refuse a request at once, and the first-come-first-served queue."""

from __future__ import annotations

import secrets
from dataclasses import replace

from server.cache.allocator import Allocator
from server.engine.request import GenerationRequest, RequestFailed


def check_request(
    request: GenerationRequest, *, max_context: int, vocab_size: int, spec_tokens: int, allocator: Allocator
) -> None:
    """Refuses what can never be served. Raises :class:`RequestFailed` (400) with the numbers that do not fit."""
    n, max_new = len(request.prompt_ids), request.sampling.max_tokens
    if n == 0:
        raise RequestFailed("empty_prompt", "the prompt is empty: it needs at least one token", status=400)
    if max_new < 1:
        raise RequestFailed("bad_max_tokens", f"max_tokens must be at least 1, got {max_new}", status=400)
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        wrong = next(i for i in request.prompt_ids if not 0 <= i < vocab_size)
        raise RequestFailed("bad_token", f"token id {wrong} is not in the vocabulary of {vocab_size}", status=400)
    if n + max_new > max_context:
        message = (
            f"the prompt has {n} tokens and max_tokens is {max_new}: {n + max_new} is over the context of {max_context}"
        )
        raise RequestFailed("context_length_exceeded", message, status=400)
    needed = tokens_held(request, spec_tokens)
    if needed > allocator.capacity_tokens:
        message = (
            f"the prompt's {n} tokens and max_tokens {max_new} need {allocator.pages_for(needed)} pages for {needed} positions, "
            f"but the whole pool holds {allocator.capacity_tokens} positions: shorten the prompt or lower max_tokens"
        )
        raise RequestFailed("context_length_exceeded", message, status=400)


def tokens_held(request: GenerationRequest, spec_tokens: int) -> int:
    """Positions a request may ever write: prompt, answer, and the draft tokens of its last step."""
    return len(request.prompt_ids) + request.sampling.max_tokens + spec_tokens


def with_seed(request: GenerationRequest) -> GenerationRequest:
    """The request with a seed drawn here if the client gave none: both nodes must draw the same numbers."""
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
