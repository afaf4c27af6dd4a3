"""Requests drawn from the server's own OpenAPI: none is a server's error, and every answer is one that it declares."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.harness import MINIMAL

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), MINIMAL.items())
def test_whole_answers_and_streams_are_declared(app: FastAPI, path: str, body: dict[str, Any], stream: bool) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    case = schema[path]["POST"].Case(body={**body, "stream": stream}, media_type="application/json")
    response = case.call_and_validate(checks=CHECKS)
    assert response.status_code == 200
    assert response.headers["content-type"][0].startswith("text/event-stream" if stream else "application/json")


def test_every_answer_to_a_drawn_request_is_declared(app: FastAPI) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    results = list(schema.get_all_operations())
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(operations) == len(results)
    assert {*MINIMAL, "/health"} <= {operation.path for operation in operations}
    for operation in operations:
        wrong = [GenerationMode.NEGATIVE] if operation.method.upper() == "POST" and operation.body else []
        for mode in (GenerationMode.POSITIVE, *wrong):

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
            def check(case: Any) -> None:
                case.call_and_validate(checks=CHECKS)

            check()
