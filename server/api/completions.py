"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from server.api.fields import ignored_header
from server.api.generations import Answer
from server.api.logprobs import finite, token_key
from server.api.schemas import CompletionRequest
from server.api.serving import check_model, check_token_id, serve
from server.api.streaming import WHOLE_OR_STREAMED
from server.api.tokenizing import encode
from server.engine.request import Backend, TokenizerLike, TokenLogprob, TokenOutput


def completions_router(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses=WHOLE_OR_STREAMED)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues each prompt."""
        check_model(backend, body.model)
        prompts = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                prompts.append(await encode(backend.tokenizer, prompt))
            else:
                for token_id in prompt:
                    check_token_id(backend, token_id, "prompt")
                prompts.append(prompt)
        writer = CompletionWriter(backend.tokenizer, _echoes(body, backend.tokenizer))
        response = await serve(request, backend, body, prompts, writer, prompt_field="prompt")
        response.headers.update(ignored_header(body.ignored))
        return response

    return router


def _echoes(body: CompletionRequest, tokenizer: TokenizerLike) -> list[str]:
    """For every generation the text that its answer begins with."""
    if not body.echo:
        return [""] * (len(body.prompt) * body.n_samples)
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in body.prompt]
    return [text for text in texts for _ in range(body.n_samples)]


class CompletionWriter:
    """Choices of ``text_completion`` objects. ``echoes`` are put before the text of each generation."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, tokenizer: TokenizerLike, echoes: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._echoes = list(echoes)
        self._offsets = [0] * len(echoes)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes[index] + answer.text,
            "logprobs": self._logprobs(index, answer.logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def chunk_choices(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        echo, self._echoes[index] = self._echoes[index], ""
        text = echo + output.text
        if not text and not output.logprobs and output.finish_reason is None:
            return []
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return [choice]

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        tokens = [token_key(self._tokenizer, entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if any(entry.top for entry in entries) else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens by their text, and the chosen one even if it is not among them."""
        top = {token_key(self._tokenizer, token_id): finite(logprob) for token_id, logprob in entry.top}
        top.setdefault(token_key(self._tokenizer, entry.token_id), finite(entry.logprob))
        return top
