"""``POST /v1/responses``: OpenAI's newer route for conversations, without anything that would have to be kept.

It is chat completions in other words: the request becomes one of those, and its answer is read in the same way. So the
same conversation has the same tokens on both routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from server.api.bodies import INLINE_NBYTES, body_nbytes
from server.api.chat_requests import answer_syntax, check_chat, conversation_of
from server.api.fields import ignored_header
from server.api.lanes import Lane
from server.api.requests import check_request, serve
from server.api.responses_fields import ResponsesRequest
from server.api.responses_writer import Echo, ResponsesWriter
from server.api.rules import read_rules
from server.api.streaming import WHOLE_OR_STREAMED, until_disconnect
from server.api.tokenizing import PromptReader
from server.chat.formats import ChatFormat
from server.engine.request import Backend
from server.failure import RequestFailed

_NAMES = {
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Chat's fields, and what they are called here."""


def responses_router(
    backend: Backend, reader: PromptReader, chat: ChatFormat, route_class: type[APIRoute]
) -> APIRouter:
    """``route_class`` bounds the body; see :func:`~server.api.bodies.bounded_route`."""
    router = APIRouter(route_class=route_class)
    end_id = None if chat.reasoning is None else backend.tokenizer.token_id(chat.reasoning.end)

    @router.post("/v1/responses", response_model=None, responses=WHOLE_OR_STREAMED)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation that the request has as a whole; nothing of it is stored."""
        with _own_names():
            fields = body.chat_request()
            rooms = check_request(backend, fields, 1)
            ignored = [*body.ignored, *map(_renamed, check_chat(fields, chat))]
            nbytes = body_nbytes(request)
            sampling = fields.sampling(backend.sampling_defaults)
            make_echo = partial(Echo.of, {**body.echo(), "temperature": sampling.temperature, "top_p": sampling.top_p})
            lane: Lane = request.app.state.answers_lane
            echo = (
                make_echo()
                if nbytes <= INLINE_NBYTES
                else await until_disconnect(request.receive, lane.run(nbytes, make_echo))
            )
            prepare = partial(chat.prepare, conversation_of(fields, chat), fields.forced_calls)
            prompt, ids = await until_disconnect(request.receive, reader.read_chat(prepare, nbytes))
            reading = read_rules(reader, fields, prompt.grammar, prompt.reasoning_rule)
            rules = await until_disconnect(request.receive, reading)
            writer = ResponsesWriter(backend, ids, answer_syntax(fields, chat, prompt), echo, end_id=end_id)
            response = await serve(
                request,
                backend,
                fields,
                [ids],
                rooms,
                writer,
                rules,
                prompt_field="input",
                make_chunks=writer.chunks,
            )
        response.headers.update(ignored_header(ignored))
        return response

    return router


@contextmanager
def _own_names() -> Iterator[None]:
    """What is wrong with a field is said of the one that the client has sent."""
    try:
        yield
    except RequestFailed as error:
        if error.param is None:
            raise
        failure = replace(error.failure, reason=_renamed(error.failure.reason), sent_kind=error.kind)
        raise RequestFailed(failure, room=error.room, param=_renamed(error.param)) from error


def _renamed(text: str) -> str:
    """``text`` with the field of chat completions that it begins with under its name of this route."""
    name = next((name for name in _NAMES if text.startswith(name)), None)
    return text if name is None else _NAMES[name] + text.removeprefix(name)
