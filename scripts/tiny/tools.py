"""Schemas of tools for training documents: the calculator in many wordings, and other tools."""

import random
import string
from collections.abc import Mapping
from typing import Any

from .words import TOOL_WORDS

Schema = Mapping[str, Any]

CALCULATOR = "calculator"
DESCRIPTIONS = (
    "Calculates a op b.",
    "Calculates a op b",
    "Performs basic arithmetic operations",
    "Performs a simple calculation on two numbers.",
    "Evaluates a simple arithmetic expression",
    "A simple calculator",
    "A calculator for two numbers.",
    "Add two numbers",
    "Returns the result of a op b.",
    "Apply an operator to two numbers.",
)
OTHER_NAMES = ("get_weather", "search", "read_file", "get_time", "query", "get_location", "search_web", "get_city")
OTHER_KEYS = ("location", "query", "path", "city", "unit", "name", "text", "value")


def calculator(rng: random.Random) -> Schema:
    """A schema of `calculator(a, op, b)` as one of the usual libraries might write it."""
    number = rng.choice(("number", "number", "integer"))
    operator: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.6:
        operator["enum"] = ["+", "-", "*", "/"][: rng.choice((3, 3, 4))]
    fields: dict[str, dict[str, Any]] = {"a": {"type": number}, "op": operator, "b": {"type": number}}
    if rng.random() < 0.3:
        for name, field in fields.items():
            field["description"] = _words(rng, 1, 4) if rng.random() < 0.5 else f"The {name}"
    if rng.random() < 0.2:
        fields = {name: {"title": name.title(), **field} for name, field in fields.items()}
    parameters: dict[str, Any] = {"type": "object", "properties": fields}
    if rng.random() < 0.8:
        parameters["required"] = ["a", "op", "b"]
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    if rng.random() < 0.25:  # the order of pydantic's schemas
        parameters = dict(sorted(parameters.items()))
    return _function(rng, CALCULATOR, rng.choice(DESCRIPTIONS) if rng.random() < 0.6 else _words(rng, 2, 9), parameters)


def other_tool(rng: random.Random) -> Schema:
    """A schema of a tool that is of no use for sums."""
    fields = {key: {"type": rng.choice(("string", "number"))} for key in rng.sample(OTHER_KEYS, rng.randint(1, 2))}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return _function(rng, rng.choice(OTHER_NAMES), _words(rng, 2, 6), parameters)


def _function(rng: random.Random, name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if rng.random() < 0.1:
        del function["description"]
    if rng.random() < 0.1:
        function["strict"] = True
    return function


def _words(rng: random.Random, least: int, most: int) -> str:
    """Some words, now and then one that the tokenizer does not know."""
    return " ".join(_word(rng) for _ in range(rng.randint(least, most)))


def _word(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return "".join(rng.choices(string.ascii_letters, k=rng.randint(2, 8)))
    return rng.choice(TOOL_WORDS)
