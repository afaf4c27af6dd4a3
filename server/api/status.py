"""The HTTP status of every kind of failure."""

from __future__ import annotations

from http import HTTPStatus

from server.failure import FailureKind

STATUS = {
    FailureKind.REQUEST: HTTPStatus.BAD_REQUEST,
    FailureKind.NOT_FOUND: HTTPStatus.NOT_FOUND,
    FailureKind.CONFLICT: HTTPStatus.CONFLICT,
    FailureKind.ABORTED: HTTPStatus.SERVICE_UNAVAILABLE,
    FailureKind.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    FailureKind.PEER: HTTPStatus.BAD_GATEWAY,
    FailureKind.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    FailureKind.DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
}
"""A client that has aborted its request reads no answer: whoever reads that it was aborted may ask again."""
