"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from server.api.answers import Answer, Writer, finite, token_key
from server.api.fields import ignored_header
from server.api.prompt_logprobs import openai_arrays, vllm_entries
from server.api.requests import check_request, serve
from server.api.rules import read_rules
from server.api.schemas import CompletionRequest
from server.api.streaming import WHOLE_OR_STREAMED, until_disconnect
from server.api.tokenizing import PromptReader
from server.engine.request import Backend, TokenLogprob, TokenOutput

_REPLACEMENT = "\ufffd"


def completions_router(backend: Backend, reader: PromptReader, route_class: type[APIRoute]) -> APIRouter:
    """``route_class`` bounds the body; see :func:`~server.api.bodies.bounded_route`."""
    router = APIRouter(route_class=route_class)

    @router.post("/v1/completions", response_model=None, responses=WHOLE_OR_STREAMED)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues each prompt."""
        rooms = check_request(backend, body, len(body.prompt))
        rules = await until_disconnect(request.receive, read_rules(reader, body))
        prompts = await until_disconnect(request.receive, reader.read(body.prompt, "prompt"))
        echoes = await until_disconnect(request.receive, _echoes(body, prompts, reader))
        writer = CompletionWriter(backend, prompts, echoes, n_prompt_logprobs=body.prompt_logprobs)
        response = await serve(request, backend, body, prompts, rooms, writer, rules, prompt_field="prompt")
        response.headers.update(ignored_header(body.ignored))
        return response

    return router


async def _echoes(body: CompletionRequest, prompts: Sequence[list[int]], reader: PromptReader) -> list[Echo]:
    """For every generation its prompt, and the text that its answer begins with."""
    if not body.echo:
        return [Echo(ids=ids) for ids in prompts for _ in range(body.n_samples)]
    decoded = iter(await reader.decode([ids for ids, given in zip(prompts, body.prompt, strict=True) if ids is given]))
    echoes = [Echo(given) if isinstance(given, str) else Echo.of_ids(next(decoded)) for given in body.prompt]
    n_top = body.logprobs
    with_ids = [replace(echo, ids=ids, n_top=n_top) for echo, ids in zip(echoes, prompts, strict=True)]
    return [replace(echo) for echo in with_ids for _ in range(body.n_samples)]


@dataclass
class Echo:
    """The prompt's text before an answer. Token ids may end inside a character: ``tail`` is the U+FFFD in its place. It
    is dropped if the answer finishes that character. ``ids`` are the prompt's tokens, and with ``n_top`` their log
    probabilities stand before those of the answer.
    """

    text: str = ""
    tail: str = ""
    n_chars: int = 0
    """Given out so far."""
    ids: Sequence[int] = ()
    n_top: int | None = None

    @classmethod
    def of_ids(cls, text: str) -> Echo:
        return cls(text[:-1], _REPLACEMENT) if text.endswith(_REPLACEMENT) else cls(text)

    def take(self, output: TokenOutput | Answer) -> str:
        """What of it goes before ``output``: once, and the tail when the answer's first text or its end is there."""
        text, self.text = self.text, ""
        if output.text or output.finish_reason is not None:
            text += "" if output.completes_prompt else self.tail
            self.tail = ""
        self.n_chars += len(text)
        return text


class CompletionWriter(Writer):
    """Choices of ``text_completion`` objects. ``echoes`` are put before the text of each generation.
    ``n_prompt_logprobs`` is what the field ``prompt_logprobs`` asks for.
    """

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[Echo],
        *,
        n_prompt_logprobs: int | None = None,
    ) -> None:
        super().__init__(backend, prompts)
        self._echoes, self._n_prompt_logprobs = echoes, n_prompt_logprobs

    def choice(self, index: int, answer: Answer | TokenOutput) -> dict[str, Any]:
        echo, found, n_top = self._echoes[index], answer.prompt_logprobs, self._n_prompt_logprobs
        before = None
        if found is not None and echo.n_top is not None:
            before = openai_arrays(self._tokenizer, echo.ids, echo.text + echo.tail, found, echo.n_top)
        choice = {
            "index": index,
            "text": echo.take(answer) + answer.text,
            "logprobs": _joined(before, self._logprobs(index, answer.logprobs)),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if found is not None and n_top is not None:
            choice["prompt_logprobs"] = vllm_entries(self._tokenizer, echo.ids, found, n_top)
        return choice

    def chunk_choices(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        choice = self.choice(index, output)
        has_content = choice["text"] or choice["logprobs"] is not None
        return [choice] if has_content or output.finish_reason is not None else []

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        start = self._echoes[index].n_chars
        return {
            "tokens": [token_key(self._tokenizer, entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if any(entry.top for entry in entries) else None,
            "text_offset": [start + entry.text_offset for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens by their text, and the chosen one even if it is not among them."""
        top = {token_key(self._tokenizer, token_id): finite(logprob) for token_id, logprob in entry.top}
        top.setdefault(token_key(self._tokenizer, entry.token_id), finite(entry.logprob))
        return top


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """The arrays of the prompt and those of the answer, one behind the other."""
    if before is None or after is None:
        return before or after
    return {name: [*before[name], *after[name]] if before[name] is not None else None for name in before}
