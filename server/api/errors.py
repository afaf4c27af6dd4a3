"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``. No answer of this server is a 422."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from server.api.request_id import HEADER, current_request
from server.api.status import STATUS
from server.failure import Failure, RequestFailed

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499
MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200
_CODES = {404: "not_found", 405: "method_not_allowed"}


class InvalidRequest(RequestFailed):
    """A request that is wrong in one field, ``param``, or as a whole."""

    def __init__(self, param: str | None, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(Failure(code, message), param=param)


def internal_error(error: Exception) -> RequestFailed:
    """What a client reads of a bug: the type of ``error``, and nothing that it says."""
    return RequestFailed(Failure("internal_error", f"Internal error: {type(error).__name__}."))


class ClientDisconnected(Exception):
    """The client closed its connection; whatever is answered reaches nobody."""


def error_body(
    message: str,
    *,
    status: int,
    code: str | None,
    param: str | None = None,
    component: str | None = None,
    room: int | None = None,
) -> dict[str, Any]:
    """The JSON body of an error. ``component`` (the state component at fault), ``room`` and ``request_id`` are left out
    where there is none.

    Messages quote what a client sent; no more of it goes back than :data:`MAX_MESSAGE_CHARS`.
    """
    message, param = _clipped(message, MAX_MESSAGE_CHARS), None if param is None else _clipped(param, MAX_PARAM_CHARS)
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error" if status == 503 else "server_error"
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if component is not None:
        error["component"] = component
    if room is not None:
        error["room"] = str(room)  # ids are beyond what a JSON number keeps exact
    if (request := current_request()) is not None:
        error["request_id"], request.code = request.id, code
    return {"error": error}


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def failure_body(failed: RequestFailed) -> dict[str, Any]:
    """The JSON body for ``failed``, as a whole answer or as the last event of a stream."""
    failure = failed.failure
    return error_body(
        failure.reason,
        status=STATUS[failure.kind],
        code=failure.code,
        param=failed.param,
        component=failure.component or None,
        room=failed.room,
    )


def error_response(body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    """A whole error answer. ASCII only: the message may quote text that cannot be encoded. A 503 says when to retry."""
    all_headers = dict(headers or {})
    if (request := current_request()) is not None:
        all_headers[HEADER] = request.id
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        all_headers.setdefault("retry-after", str(RETRY_AFTER_S))
    return Response(json.dumps(body), status_code=status, headers=all_headers, media_type="application/json")


def failure_response(failed: RequestFailed) -> Response:
    headers = {} if failed.room is None else {"x-pd-room": str(failed.room)}
    return error_response(failure_body(failed), STATUS[failed.kind], headers)


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error of ``app`` this shape, whichever layer it comes from."""
    app.add_exception_handler(RequestFailed, _on_failure)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


async def _on_failure(_request: Request, failure: Exception) -> Response:
    assert isinstance(failure, RequestFailed)
    return failure_response(failure)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    """The complaint about the first wrong field; the others mostly follow from it."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return failure_response(InvalidRequest(None, f"The body is not valid JSON: {reason}.", code="invalid_json"))
    if isinstance(error.body, bytes):
        message = "The body must be JSON, with the header Content-Type: application/json."
        return error_response(error_body(message, status=400, code="invalid_content_type"), 400)
    param = _param(first["loc"])
    reasons = dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in errors if _param(e["loc"]) == param)
    reason = ", or: ".join(reasons)  # several where a field may have several types
    message = f"{param}: {reason}" if param else f"The body must be a JSON object: {reason}"
    return failure_response(InvalidRequest(param, message))


def _param(location: Sequence[str | int]) -> str | None:
    """``messages.0.content`` from pydantic's location, which begins with the body and also names a union's types."""
    names = [str(part) for part in location[1:] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    return ".".join(names) or None


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"There is no {request.url.path} here."
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and request.method == "OPTIONS":
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=_with_head(error.headers))
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not take {request.method}."
    body = error_body(message, status=error.status_code, code=_CODES.get(error.status_code, "invalid_request"))
    return error_response(body, error.status_code, _with_head(error.headers))


def _with_head(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """``headers``, where what may be asked for with GET may be with HEAD."""
    both = MutableHeaders(headers or {})
    methods = [method.strip() for method in both.get("allow", "").split(",")]
    if "GET" in methods:
        both["allow"] = ", ".join(dict.fromkeys([*methods, "HEAD"]))
    return both


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed: %r", request.method, request.url.path, error)
    return failure_response(internal_error(error))
