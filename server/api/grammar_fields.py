"""What a client may send to say what the answer must look like: OpenAI's ``response_format``, vLLM's
``structured_outputs`` and older ``guided_*``, SGLang's ``json_schema``, ``regex`` and ``ebnf``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from server.api.errors import InvalidRequest
from server.engine.grammar import Grammar, check_length

MAX_CHOICES = 1024

Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class GrammarFields(BaseModel):
    """At most one of them may say what the answer must look like."""

    model_config = ConfigDict(strict=True, extra="ignore")

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def grammar_fields(self) -> list[str]:
        """The names of those that the request has."""
        return [name for name in GrammarFields.model_fields if getattr(self, name) not in (None, "")]

    def grammar(self) -> Grammar | None:
        """What the answer must match, None if nothing. Its cost follows the size of the request.

        :raises InvalidRequest: names the field that is wrong.
        """
        found = {name: grammar for name in self.grammar_fields if (grammar := self._grammar_of(name)) is not None}
        if len(found) > 1:
            raise InvalidRequest(
                list(found)[1], f"{' and '.join(found)} both say what the answer must look like: leave all but one out."
            )
        for name, grammar in found.items():
            try:
                check_length(grammar.text)  # before anything else is made of it
            except ValueError as error:
                raise InvalidRequest(name, f"{name}: {error}", code="invalid_grammar") from error
            return grammar
        return None

    def _grammar_of(self, name: str) -> Grammar | None:
        value = getattr(self, name)
        match name:
            case "response_format":
                return _of_response_format(value)
            case "structured_outputs":
                return _of_structured_outputs(value)
            case "guided_json" | "json_schema":
                return _json_schema(value, name)
            case "guided_regex" | "regex":
                return Grammar("regex", value)
            case "guided_choice":
                return Grammar.choice(value)
            case _:
                return _ebnf(value, name)


def _of_response_format(value: Mapping[str, Any]) -> Grammar | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_object()
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or "schema" not in inner:
                message = "response_format.json_schema must be an object with the schema in its field schema."
                raise InvalidRequest("response_format", message)
            return _json_schema(inner["schema"], "response_format.json_schema.schema")
    message = "response_format.type must be text, json_object or json_schema."
    raise InvalidRequest("response_format", message, code="unsupported")


def _of_structured_outputs(value: Mapping[str, Any]) -> Grammar | None:
    for name, given in value.items():
        if name not in _STRUCTURES and given not in (None, False, ""):
            message = f"structured_outputs.{name[:60]} is not supported by this server: leave it out."
            raise InvalidRequest("structured_outputs", message, code="unsupported")
    given = [name for name in _STRUCTURES if value.get(name) not in (None, False)]
    if len(given) != 1:
        message = f"structured_outputs must have exactly one of {', '.join(_STRUCTURES)}."
        raise InvalidRequest("structured_outputs", message)
    return _STRUCTURES[given[0]](value[given[0]], f"structured_outputs.{given[0]}")


def _json_schema(schema: Any, field: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(field, f"{field} is not JSON: {error}", code="invalid_grammar") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(field, f"{field} must be a JSON schema, an object.", code="invalid_grammar")
    try:
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"{field} is not JSON: {error}", code="invalid_grammar") from error


def _regex(text: Any, field: str) -> Grammar:
    if not isinstance(text, str):
        raise InvalidRequest(field, f"{field} must be a string.", code="invalid_grammar")
    return Grammar("regex", text)


def _choice(choices: Any, field: str) -> Grammar:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest(field, f"{field} must be a list of strings.", code="invalid_grammar")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(field, f"{field} must have 1 to {MAX_CHOICES} choices.", code="invalid_grammar")
    return Grammar.choice(choices)


def _ebnf(text: Any, field: str) -> Grammar:
    if not isinstance(text, str):
        raise InvalidRequest(field, f"{field} must be a string.", code="invalid_grammar")
    try:
        return Grammar.ebnf(text)
    except ValueError as error:
        raise InvalidRequest(field, f"{field}: {error}", code="invalid_grammar") from error


_STRUCTURES: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": lambda value, field: Grammar.json_object(),
}
