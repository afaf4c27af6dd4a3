"""Random JSON schemas as clients write them: objects and arrays in each other, of every simple type, mostly bounded."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Schema = dict[str, Any]
NAMES = ("name", "age", "tags", "size", "ok", "größe")
PATTERNS = ("^[a-z]{3,8}$", r"^\d{4}-\d{2}$", "^(red|green|blue)$")
FORMATS = ("date", "time", "uuid", "ipv4")
VALUES = (1, "a", 'b "c"', None, True, 2.5, "äß")


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "string"}
    if draw(st.booleans()):
        schema["maxLength"] = draw(st.integers(1, 30))
    if draw(st.booleans()):
        schema["minLength"] = draw(st.integers(0, min(5, schema.get("maxLength", 5))))
    return schema


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    if draw(st.booleans()):
        schema["minimum"] = draw(st.integers(-1000, 1000))
    if draw(st.booleans()):
        schema["maximum"] = schema.get("minimum", 0) + draw(st.integers(1, 10_000))
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4))
    required = draw(st.lists(st.sampled_from(list(properties)), unique=True)) if properties else []
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    if draw(st.integers(0, 3)):
        schema["additionalProperties"] = False
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "array", "items": draw(inner)}
    if draw(st.integers(0, 3)):
        schema["maxItems"] = draw(st.integers(1, 5))
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, min(2, schema.get("maxItems", 2))))
    return schema


def containers(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return objects(inner) | arrays(inner)


SIMPLE = st.one_of(
    strings(),
    numbers(),
    st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind}),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.sampled_from([*VALUES, [1, "x"], {"k": None}]).map(lambda value: {"const": value}),
)
ANY = st.recursive(
    SIMPLE,
    lambda inner: containers(inner) | st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    max_leaves=6,
)
SCHEMAS = containers(ANY)


def random_schemas(n: int, number: int = 0) -> list[Schema]:
    """The same ``n`` schemas for the same ``number``."""
    found: list[Schema] = []

    @seed(number)
    @settings(max_examples=n, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(SCHEMAS)
    def draw(schema: Schema) -> None:
        found.append(schema)

    draw()
    return found[:n]
