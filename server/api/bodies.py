"""JSON bodies: their structure is counted before a single object is built from them, and large ones leave the loop."""

from __future__ import annotations

import email.message
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from server.api.errors import InvalidRequest
from server.api.lanes import Lane
from server.api.streaming import until_disconnect
from server.engine.request import Backend

MIN_MAX_VALUES = 1 << 19
"""Elements that a body may have whatever the context is."""
INLINE_NBYTES = 1 << 14
"""Smaller bodies are read in the event loop, in well under a millisecond."""
_STRUCTURE = b'"{}[],'
_TEXT = bytes(byte for byte in range(256) if byte not in _STRUCTURE)


@dataclass(frozen=True)
class StructureLimits:
    """What one body may consist of."""

    max_values: int
    """Elements: each is an object for a while."""
    max_depth: int = 64
    """Lists and objects inside each other."""
    max_containers: int = 1 << 15
    """Lists and objects: a conversation of the most messages, each with a list of parts, has a third."""
    max_strings: int = 1 << 16
    """Strings, keys included."""

    @classmethod
    def for_context(cls, max_context: int) -> StructureLimits:
        """A prompt may fill the context with token ids, and there may be some more elements."""
        return cls(max_values=max(MIN_MAX_VALUES, max_context + cls.max_strings))


def check_structure(body: bytes, limits: StructureLimits) -> None:
    """Bounds what reading ``body`` can cost, whatever it is: a few passes at the speed of ``memchr``.

    :raises InvalidRequest: 400 with both numbers. Broken JSON may pass; the parser will refuse it.
    """
    if b"\\" in body:  # most have none, which costs a tenth to find out
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare = body.translate(None, _TEXT)
    _check_number("strings", bare.count(b'"') // 2, limits.max_strings)
    outside = b"".join(bare.split(b'"')[::2])
    n_containers = outside.count(b"[") + outside.count(b"{")
    _check_number("elements", outside.count(b",") + n_containers, limits.max_values)
    _check_number("lists and objects", n_containers, limits.max_containers)
    depth = deepest = 0
    for byte in outside.replace(b",", b"")[: 2 * n_containers]:  # more can only be brackets that close nothing
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > limits.max_depth:
        message = f"The body has {deepest} lists and objects inside each other: at most {limits.max_depth}."
        raise InvalidRequest(None, message)


def _check_number(what: str, n: int, most: int) -> None:
    if n > most:
        raise InvalidRequest(None, f"The body has {n} {what}: at most {most} are taken.", code="too_many_elements")


def parse_json(body: bytes, limits: StructureLimits) -> Any:
    """:raises InvalidRequest: 400, the body is no JSON or has too many parts."""
    check_structure(body, limits)
    try:
        return json.loads(body.decode("utf-8-sig"))  # in no other encoding are the counted bytes the characters
    except json.JSONDecodeError as error:
        raise InvalidRequest(None, f"The body is not valid JSON: {error.msg}.", code="invalid_json") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or a number of more than 4,300 digits
        raise InvalidRequest(None, f"The body is not valid JSON: {error}", code="invalid_json") from error


def bounded_route(lane: Lane, backend: Backend) -> type[APIRoute]:
    """The class of routes whose JSON body is bounded, and read in ``lane`` if it is large.

    A body may have as many token ids as the context of ``backend``, and more.
    """

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                if not _is_json(request):
                    return await handle(request)
                body = b"".join([chunk async for chunk in request.stream()])
                nbytes, limits = len(body), StructureLimits.for_context(backend.max_context)
                if nbytes <= INLINE_NBYTES:
                    value = parse_json(body, limits) if body else None
                else:
                    read = lane.run(nbytes, partial(parse_json, body, limits))
                    value = await until_disconnect(request.receive, read)
                del body  # the answer may take minutes
                return await handle(ParsedRequest(request, value, nbytes))

            return bounded

    return BoundedRoute


class ParsedRequest(Request):
    """A request whose JSON has been read. The bytes are not kept; ``nbytes`` is how many they were."""

    def __init__(self, request: Request, value: Any, nbytes: int) -> None:
        super().__init__(request.scope, request.receive)
        self.nbytes = nbytes
        self._value = [value]

    async def body(self) -> bytes:
        """Nothing if there was no body, else some bytes: FastAPI only asks whether there was one."""
        return b"read already" if self.nbytes else b""

    async def json(self) -> Any:
        """What was read. It is handed over: a second call raises."""
        return self._value.pop()


def body_nbytes(request: Request) -> int:
    """The size of a request's JSON body; 0 if it had none."""
    return request.nbytes if isinstance(request, ParsedRequest) else 0


def _is_json(request: Request) -> bool:
    """As FastAPI decides whether it reads a body as JSON."""
    message = email.message.Message()
    message["content-type"] = request.headers.get("content-type", "")
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
