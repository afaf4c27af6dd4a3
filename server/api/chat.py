"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from server.api.answers import Answer, Writer, finite, token_key
from server.api.bodies import body_nbytes
from server.api.errors import InvalidRequest
from server.api.fields import ignored_fields, ignored_header
from server.api.prompt_logprobs import vllm_entries
from server.api.requests import check_request, serve
from server.api.rules import read_rules
from server.api.schemas import ChatCompletionRequest
from server.api.streaming import WHOLE_OR_STREAMED, until_disconnect
from server.api.tokenizing import PromptReader
from server.engine.request import Backend, TokenizerLike, TokenLogprob, TokenOutput

_CALLS = frozenset({"tool_calls", "tool_call_id", "function_call"})
"""What an assistant did instead of saying something; a conversation without it is another one."""


def chat_router(backend: Backend, reader: PromptReader, route_class: type[APIRoute]) -> APIRouter:
    """``route_class`` bounds the body; see :func:`~server.api.bodies.bounded_route`."""
    router = APIRouter(route_class=route_class)

    @router.post("/v1/chat/completions", response_model=None, responses=WHOLE_OR_STREAMED)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation, spelt by the model directory's own chat template."""
        rooms = check_request(backend, body, 1)
        rules = await until_disconnect(request.receive, read_rules(reader, body))
        ignored = [*body.ignored, *check_template(body, backend.tokenizer)]
        prompts = [await until_disconnect(request.receive, read_conversation(reader, body, body_nbytes(request)))]
        writer = ChatWriter(backend, prompts, n_prompt_logprobs=body.prompt_logprobs)
        response = await serve(request, backend, body, prompts, rooms, writer, rules, prompt_field="messages")
        response.headers.update(ignored_header(ignored))
        return response

    return router


async def read_conversation(reader: PromptReader, body: ChatCompletionRequest, body_nbytes: int) -> list[int]:
    """Token ids of the conversation in ``body``, whose size is ``body_nbytes``.

    :raises RequestFailed: as :meth:`.PromptReader.read_chat`.
    """
    return await reader.read_chat(
        [message.for_template() for message in body.messages],
        body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        body_nbytes=body_nbytes,
    )


def check_template(body: ChatCompletionRequest, tokenizer: TokenizerLike) -> list[str]:
    """What the request says to a chat template that does not read it, the first few names.

    :raises InvalidRequest: an answer that leaves it out is not the answer to this conversation; or a role that the
        template does not tell from the others: such a message would stand in the prompt as if the user had said it.
    """
    if not body.add_generation_prompt and not tokenizer.template_reads("add_generation_prompt"):
        raise InvalidRequest(
            "add_generation_prompt",
            "add_generation_prompt: false is not supported: the chat template of this model does not read it.",
            code="unsupported",
        )
    extra = {name: value for message in body.messages for name, value in (message.model_extra or {}).items() if value}
    for name in _CALLS & extra.keys():
        if not tokenizer.template_reads(name):
            raise InvalidRequest(
                "messages",
                f"messages: {name} is not supported: the chat template of this model does not read it.",
                code="unsupported",
            )
    for role in {message.role for message in body.messages}:
        if not tokenizer.template_knows_role(role):
            message = f"messages: the chat template of this model does not know the role {role[:60]!r}."
            raise InvalidRequest("messages", message, code="unknown_role")
    kwargs = ignored_fields(body.chat_template_kwargs or {}, (), "chat_template_kwargs.")
    names = [*kwargs, *ignored_fields(extra, (), "messages.")]
    return [name for name in names if not tokenizer.template_reads(name.rpartition(".")[2])]


class ChatWriter(Writer):
    """Choices of ``chat.completion`` objects. A stream's first chunk for each choice carries the role alone.
    ``n_prompt_logprobs`` is what the field ``prompt_logprobs`` asks for.
    """

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self, backend: Backend, prompts: Sequence[Sequence[int]], *, n_prompt_logprobs: int | None = None
    ) -> None:
        super().__init__(backend, prompts)
        self._prompts, self._n_prompt_logprobs = prompts, n_prompt_logprobs
        self._begun: set[int] = set()

    def whole(self, answers: Sequence[Answer], pd: Mapping[str, str]) -> Any:
        """As vLLM does, with the log probabilities of the prompt beside the choices, which have it in common."""
        answer, found, n_top = super().whole(answers, pd), answers[0].prompt_logprobs, self._n_prompt_logprobs
        if found is not None and n_top is not None:
            answer["prompt_logprobs"] = vllm_entries(self._tokenizer, self._prompts[0], found, n_top)
        return answer

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
        if not entries:
            return None
        content = []
        for entry in entries:
            top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
            content.append(self._token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_key(self._tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
