"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from server.api.generations import Answer
from server.api.logprobs import chat_entry
from server.api.schemas import ChatCompletionRequest
from server.api.serving import check_model, serve
from server.api.tokenizing import encode_chat
from server.engine.request import Backend, TokenizerLike, TokenLogprob, TokenOutput


def chat_router(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation, spelt by the model directory's own chat template."""
        check_model(backend, body.model)
        messages = [message.for_template() for message in body.messages]
        prompt = await encode_chat(
            backend.tokenizer,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            **(body.chat_template_kwargs or {}),
        )
        return await serve(request, backend, body, [prompt], ChatWriter(backend.tokenizer), prompt_field="messages")

    return router


class ChatWriter:
    """Choices of ``chat.completion`` objects. A stream's first chunk for each choice carries the role alone."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def chunk_choices(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        choices = []
        if index not in self._begun:
            self._begun.add(index)
            role = {"role": "assistant", "content": ""}
            choices.append({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
        if output.text or output.logprobs or output.finish_reason is not None:
            choice = {
                "index": index,
                "delta": {"content": output.text} if output.text else {},
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
            }
            if output.finish_reason is not None:
                choice["stop_reason"] = output.stop_reason
            choices.append(choice)
        return choices

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return {"content": [chat_entry(self._tokenizer, entry) for entry in entries]} if entries else None
