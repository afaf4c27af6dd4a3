"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's words: a text or a conversation as token ids, and back.

The texts are bounded and read where prompts are. Nothing is generated, so both roles answer.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.api.answers import token_key
from server.api.bodies import body_nbytes
from server.api.chat_requests import check_chat, conversation_of
from server.api.errors import InvalidRequest
from server.api.fields import ignored_fields, ignored_header
from server.api.requests import check_model
from server.api.schemas import ChatCompletionRequest
from server.api.streaming import until_disconnect
from server.api.tokenizing import PromptReader
from server.chat.formats import ChatFormat
from server.engine.request import Backend


class TokenizeText(BaseModel):
    """A text."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that this server does not know, the first few."""
        return ignored_fields(self.model_extra or {}, ())


class TokenizeChat(ChatCompletionRequest):
    """A conversation, with the fields of a chat completion; those that only matter for an answer have no effect."""

    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Annotated[
        list[Any], Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})
    ]  # whoever knows the context and the vocabulary looks at them, after their number


def _kind(body: Any) -> str:
    return "a-chat" if isinstance(body, TokenizeChat) or (isinstance(body, dict) and "messages" in body) else "a-text"


# The tags are no names, so that errors do not take them for fields.
TokenizeRequest = Annotated[
    Annotated[TokenizeChat, Tag("a-chat")] | Annotated[TokenizeText, Tag("a-text")], Discriminator(_kind)
]


def tokens_router(backend: Backend, reader: PromptReader, chat: ChatFormat, route_class: type[APIRoute]) -> APIRouter:
    """``route_class`` bounds the body; see :func:`~server.api.bodies.bounded_route`."""
    router = APIRouter(route_class=route_class)

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The token ids of ``prompt``, or of ``messages`` as the chat route spells them."""
        check_model(backend, body.model)
        if isinstance(body, TokenizeText):
            ignored = body.ignored
            read = reader.read([body.prompt], "prompt", add_special_tokens=body.add_special_tokens)
            [ids] = await until_disconnect(request.receive, read)
        else:
            ignored = [*body.ignored, *check_chat(body, chat)]
            prepare = partial(chat.prepare, conversation_of(body, chat), body.forced_calls)
            _, ids = await until_disconnect(request.receive, reader.read_chat(prepare, body_nbytes(request)))
        names = None
        if body.return_token_strs:
            spell = reader.map_ids(ids, lambda token_id: token_key(backend.tokenizer, token_id))
            names = await until_disconnect(request.receive, spell)
        answer = {"count": len(ids), "max_model_len": backend.max_context, "tokens": ids, "token_strs": names}
        return JSONResponse(answer, headers=ignored_header(ignored))

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of ``tokens``; special tokens have none."""
        check_model(backend, body.model)
        if len(body.tokens) > backend.max_context:
            message = f"tokens has {len(body.tokens)} ids: at most {backend.max_context}, the context, are taken."
            raise InvalidRequest("tokens", message, code="context_length_exceeded")
        text = ""
        if body.tokens:
            text = await until_disconnect(request.receive, reader.text_of(body.tokens, "tokens"))
        return JSONResponse({"prompt": text}, headers=ignored_header(ignored_fields(body.model_extra or {}, ())))

    return router
