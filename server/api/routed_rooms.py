"""The room that a router names in a request: ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room``.

A router sends the same body to a prefill and to a decode node; the room is how the two find each other. Each field is
one value, or a list with one value for each prompt or for each generation (prompts times ``n``). Where samples of one
prompt share a room, each but the first gets another one, which both nodes derive alike: see :func:`sample_room`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import PlainValidator, WithJsonSchema

from server.api.errors import InvalidRequest
from server.engine.request import RoutedRoom

MAX_GENERATIONS = 256
"""Prompts times samples in one HTTP request."""
MAX_ROOM = 2**63 - 1
"""Largest room id; 0 is as good as any other."""
_SAMPLE_STRIDE = 0x1E3779B97F4A7C15
"""Odd, so that no two samples meet; about a golden section of the ids."""
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
        raise ValueError(f"{_shown(value)} is not an integer: {what} is one from {smallest} to {largest}")
    if not smallest <= value <= largest:
        raise ValueError(f"{what} must be from {smallest} to {largest}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """What a client sent, for a message; the cost does not follow its size."""
    return reprlib.repr(value)[:60]


def _room(value: Any) -> int:
    return _integer(value, "a room id", 0, MAX_ROOM)


def _port(value: Any) -> int:
    return _integer(value, "a port", 1, _MAX_PORT)


def _host(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_HOST_CHARS or not value.isprintable():
        raise ValueError(f"{_shown(value)} is not the name or address of a host")
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


def routed_rooms(
    hosts: str | list[str] | None,
    ports: int | list[int] | None,
    rooms: int | list[int] | None,
    *,
    n_prompts: int,
    n_samples: int,
    on_prefill: bool,
) -> list[RoutedRoom | None]:
    """The room of each generation, samples of one prompt side by side; all None where the request names none.

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
        return [None] * (n_prompts * n_samples)
    if not on_prefill:
        for field, value in (("bootstrap_host", hosts), ("bootstrap_port", ports)):
            if value is None:
                message = f"{field} is missing: with bootstrap_room it says which prefill node has the room."
                raise InvalidRequest(field, message)
    each_room = [rooms] if isinstance(rooms, int) else rooms
    if len(each_room) == n_prompts:
        each_room = [sample_room(room, sample) for room in each_room for sample in range(n_samples)]
    columns = [
        _spread("bootstrap_room", each_room, n_prompts, n_samples),
        _spread("bootstrap_host", hosts, n_prompts, n_samples),
        _spread("bootstrap_port", ports, n_prompts, n_samples),
    ]
    if len(set(each_room)) < len(each_room):
        raise InvalidRequest("bootstrap_room", "bootstrap_room names one room twice: each prompt needs its own.")
    return [RoutedRoom(*fields) for fields in zip(*columns, strict=True)]


def sample_room(room: int, sample: int) -> int:
    """The room of one sample where a router names one room for all samples of a prompt; the first has ``room`` itself.

    The others lie far away, so that they meet no other room by chance, whether ids are random or small.
    """
    return (room + sample * _SAMPLE_STRIDE) % (MAX_ROOM + 1)


def _spread(field: str, value: Any, n_prompts: int, n_samples: int) -> list[Any]:
    """One value for each generation."""
    n_generations = n_prompts * n_samples
    if not isinstance(value, list):
        return [value] * n_generations
    if len(value) == n_generations:
        return value
    if len(value) == n_prompts:
        return [element for element in value for _ in range(n_samples)]
    wanted = f"{n_prompts} prompts" + (f" with {n_samples} samples each" if n_samples > 1 else "")
    raise InvalidRequest(field, f"{field} has {len(value)} elements for {wanted}.")
