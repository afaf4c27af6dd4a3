"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from server.api.bodies import body_nbytes
from server.api.chat_requests import answer_syntax, check_chat, conversation_of
from server.api.chat_writer import ChatWriter
from server.api.fields import ignored_header
from server.api.requests import check_request, serve
from server.api.rules import read_rules
from server.api.schemas import ChatCompletionRequest
from server.api.streaming import WHOLE_OR_STREAMED, until_disconnect
from server.api.tokenizing import PromptReader
from server.chat.formats import ChatFormat
from server.engine.request import Backend


def chat_router(backend: Backend, reader: PromptReader, chat: ChatFormat, route_class: type[APIRoute]) -> APIRouter:
    """``route_class`` bounds the body; see :func:`~server.api.bodies.bounded_route`."""
    router = APIRouter(route_class=route_class)

    @router.post("/v1/chat/completions", response_model=None, responses=WHOLE_OR_STREAMED)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation, spelt by the checkpoint's chat format."""
        rooms = check_request(backend, body, 1)
        ignored = [*body.ignored, *check_chat(body, chat)]
        prepare = partial(chat.prepare, conversation_of(body, chat), body.forced_calls)
        prompt, ids = await until_disconnect(request.receive, reader.read_chat(prepare, body_nbytes(request)))
        reading = read_rules(reader, body, prompt.grammar, prompt.reasoning_rule)
        rules = await until_disconnect(request.receive, reading)
        writer = ChatWriter(backend, [ids], answer_syntax(body, chat, prompt), n_prompt_logprobs=body.prompt_logprobs)
        response = await serve(request, backend, body, [ids], rooms, writer, rules, prompt_field="messages")
        response.headers.update(ignored_header(ignored))
        return response

    return router
