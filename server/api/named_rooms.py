"""The room that a router names in a request: ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room``.

A router sends the same body to a prefill and to a decode node; the room is how the two find each other. Each field is
one value, or a list with one value for each generation (prompts times ``n``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import PlainValidator, WithJsonSchema

from server.api.errors import InvalidRequest
from server.engine.request import NamedRoom

MAX_GENERATIONS = 256
"""Prompts times samples in one HTTP request."""
MAX_ROOM = 2**63 - 1
"""Largest room id; 0 is as good as any other."""
_MAX_PORT = 65535
_MAX_HOST_CHARS = 255

T = TypeVar("T")


def _one_or_list(check: Callable[[Any], T], schema: dict[str, Any]) -> Any:
    """Annotations of a field that is one value or a list, each checked by ``check``."""

    def parse(value: Any) -> T | list[T] | None:
        if value is None:
            return None
        if not isinstance(value, list):
            return check(value)
        if not 1 <= len(value) <= MAX_GENERATIONS:
            raise ValueError(f"the list has {len(value)} elements: 1 to {MAX_GENERATIONS} are allowed")
        return [check(element) for element in value]

    many = {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_GENERATIONS}
    return PlainValidator(parse), WithJsonSchema({"anyOf": [schema, many, {"type": "null"}]})


def _integer(value: Any, what: str, smallest: int, largest: int) -> int:
    """``value`` if it is an integer in range. A float never is: above 2^53 it would name another room."""
    if type(value) is not int:
        raise ValueError(f"{value!r:.60} is not an integer: {what} is one from {smallest} to {largest}")
    if not smallest <= value <= largest:
        raise ValueError(f"{what} must be from {smallest} to {largest}, got {value!r:.60}")
    return value


def _room(value: Any) -> int:
    return _integer(value, "a room id", 0, MAX_ROOM)


def _port(value: Any) -> int:
    return _integer(value, "a port", 1, _MAX_PORT)


def _host(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_HOST_CHARS or not value.isprintable():
        raise ValueError(f"{value!r:.60} is not the name or address of a host")
    return value


Hosts = Annotated[
    str | list[str] | None,
    *_one_or_list(_host, {"type": "string", "minLength": 1, "maxLength": _MAX_HOST_CHARS}),
]
Ports = Annotated[int | list[int] | None, *_one_or_list(_port, {"type": "integer", "minimum": 1, "maximum": _MAX_PORT})]
Rooms = Annotated[
    int | list[int] | None,
    *_one_or_list(_room, {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_ROOM + 1}),  # exact as a float too
]


def named_rooms(
    hosts: str | list[str] | None,
    ports: int | list[int] | None,
    rooms: int | list[int] | None,
    n_generations: int,
    *,
    on_prefill: bool,
) -> list[NamedRoom | None]:
    """The room of each generation, all None where the request names none.

    One host or port holds for all rooms. The prefill node, which is the host, needs no host and port.

    :raises InvalidRequest: 400, names the field that is missing, has another number of elements, or repeats a room.
    """
    if rooms is None:
        if on_prefill:
            raise InvalidRequest(
                "bootstrap_room",
                "This is a prefill node: it answers only a request that names its room (bootstrap_room), which a "
                "decode node must be asked for too. Send other requests to a decode node.",
                code="wrong_role",
            )
        for field, value in (("bootstrap_host", hosts), ("bootstrap_port", ports)):
            if value is not None:
                raise InvalidRequest("bootstrap_room", f"{field} is given, but bootstrap_room is missing.")
        return [None] * n_generations
    each_room = _spread("bootstrap_room", [rooms] if isinstance(rooms, int) else rooms, n_generations)
    if len(set(each_room)) < len(each_room):
        raise InvalidRequest("bootstrap_room", "bootstrap_room names one room twice: each generation needs its own.")
    if not on_prefill:
        for field, value in (("bootstrap_host", hosts), ("bootstrap_port", ports)):
            if value is None:
                message = f"{field} is missing: with bootstrap_room it says which prefill node has the room."
                raise InvalidRequest(field, message)
    each_host = _spread("bootstrap_host", hosts, n_generations)
    each_port = _spread("bootstrap_port", ports, n_generations)
    return [NamedRoom(*named) for named in zip(each_room, each_host, each_port, strict=True)]


def _spread(field: str, value: Any, n_generations: int) -> list[Any]:
    """One value for each generation, where ``value`` is one for all or a list."""
    if not isinstance(value, list):
        return [value] * n_generations
    if len(value) != n_generations:
        message = f"{field} has {len(value)} elements for {n_generations} generations (prompts times n)."
        raise InvalidRequest(field, message)
    return value
