"""Schemas and the short JSON that fits them, for training documents that ask for a reply in a given form."""

import random
import string
from collections.abc import Mapping
from typing import Any

from .words import GOODS, ITEMS, JSON_WORDS, NAMES, PLACES

SIMPLE = ("string", "integer", "number", "boolean", "null")


def any_schema(rng: random.Random, depth: int = 0) -> Mapping[str, Any]:
    """A schema of an object with up to three properties; some hold arrays and objects."""
    properties = {_name(rng): _property(rng, depth) for _ in range(rng.randint(1 if depth == 0 else 0, 3))}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        schema["required"] = list(properties)
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def _property(rng: random.Random, depth: int) -> Mapping[str, Any]:
    chance = rng.random()
    if depth < 2 and chance < 0.15:
        return any_schema(rng, depth + 1)
    if depth < 2 and chance < 0.3:
        return {"type": "array", "items": _property(rng, depth + 1)}
    if chance < 0.4:
        return {"enum": rng.sample([*GOODS, *PLACES], rng.randint(1, 3))}
    return {"type": rng.choice(SIMPLE)}


def short_value(rng: random.Random, schema: Mapping[str, Any]) -> Any:
    """A value that `schema` allows, as short as a plain reply would be; optional properties are given too."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "object":
            return {name: short_value(rng, each) for name, each in schema["properties"].items()}
        case "array":
            return [short_value(rng, schema["items"]) for _ in range(rng.choice((0, 1, 1, 2)))]
        case "string":
            return rng.choice((*NAMES, *GOODS, *ITEMS, *PLACES)) if rng.random() < 0.9 else ""
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "number" if rng.random() < 0.2:
            return rng.randint(0, 99) / 10
        case _:
            return rng.randint(0, 99)


def _name(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(JSON_WORDS)
    return "".join(rng.choices(string.ascii_letters + "_", k=rng.randint(1, 8)))
