"""Frames that nobody should send: noise, real messages damaged in every way, and real messages at the wrong time.

A pure function of its seed and of the messages that it starts from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from server.transfer.frames import HEADER_NBYTES, ProtocolError, decode, encode, seal
from server.transfer.manifest import PROTOCOL_VERSION
from server.transfer.protocol import MAX_SMALL_FRAME_NBYTES, AnyMessage, Reserve, RoomRequest

UNDERSTOOD, RAGGED = "understood", "ragged"
"""Fates of a frame that is a message, whose meaning is the node's business. ``RAGGED``: a ``Reserve`` with a prompt
that is no whole number of ids is dropped as malformed as well, but only from a registered peer.
"""

_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1.5,
    float("nan"),
    float("inf"),
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    "",
    "x",
    "x" * 70_000,
    "\x00",
    b"",
    b"\xff" * 300,
    [],
    [[[[]]]],
    [0] * 5000,
    {},
    {"type": "Ping"},
)
_LENGTHS = tuple(kind + b"\xff" * 4 for kind in (b"\xdb", b"\xdd", b"\xdf", b"\xc6", b"\xc9"))
"""Beginnings of msgpack strings, arrays, maps, binaries and extensions of 4 GiB."""

Parts = tuple[bytes, ...]


def fate_of(parts: Parts) -> str:
    """How a node must count this message: a reason of ``pd_control_frames_dropped_total``, or :data:`UNDERSTOOD`."""
    if len(parts) != 1:
        return "garbage"
    try:
        message = decode(parts[0])
    except ProtocolError as error:
        return error.kind
    request = message.request if isinstance(message, Reserve) else None
    return RAGGED if isinstance(request, RoomRequest) and len(request.prompt) % 4 else UNDERSTOOD


class FrameFuzzer:
    """Draws messages, as the parts that are sent. ``messages`` are real ones: they are damaged, or sent as they are."""

    def __init__(self, rng: random.Random, messages: Sequence[AnyMessage]) -> None:
        self._rng = rng
        self._frames = [encode(message) for message in messages]
        self._sent: list[bytes] = list(self._frames)
        self._ways: dict[Callable[[], Parts], float] = {
            self._noise: 20,
            self._bits: 25,
            self._cut: 8,
            self._inserted: 6,
            self._spliced: 6,
            self._other_value: 15,
            self._other_version: 4,
            self._huge_length: 4,
            self._other_parts: 4,
            self._again: 8,
            self._deep: 0.2,
            self._large: 0.3,
        }

    def draw(self) -> Parts:
        (way,) = self._rng.choices(list(self._ways), list(self._ways.values()))
        parts = way()
        if len(parts) == 1 and len(parts[0]) < 10_000 and self._rng.random() < 0.05:
            self._sent[self._rng.randrange(len(self._sent))] = parts[0]
        return parts

    def _real(self) -> bytes:
        return self._rng.choice(self._frames)

    def _damaged(self, frame: bytes) -> Parts:
        """A damaged frame, most often with the digest that it would have if it had been made so."""
        return (seal(frame[HEADER_NBYTES:]) if self._rng.random() < 0.8 else frame,)

    def _noise(self) -> Parts:
        data = self._rng.randbytes(self._rng.choice((0, 1, 2, 3, 4, 10, 100, 300, 2000)))
        return (self._rng.choice((data, seal(data))),)

    def _bits(self) -> Parts:
        data = bytearray(self._real())
        for _ in range(self._rng.randint(1, 4)):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return self._damaged(bytes(data))

    def _cut(self) -> Parts:
        data = self._real()
        return self._damaged(data[: self._rng.randrange(len(data))])

    def _inserted(self) -> Parts:
        data, at = self._real(), self._rng.randrange(HEADER_NBYTES, HEADER_NBYTES + 40)
        return self._damaged(data[:at] + self._rng.randbytes(self._rng.randint(1, 20)) + data[at:])

    def _spliced(self) -> Parts:
        first, second = self._real(), self._real()
        return self._damaged(first[: self._rng.randrange(len(first))] + second[self._rng.randrange(len(second)) :])

    def _other_value(self) -> Parts:
        """One field, at any depth, with another value, missing, or one too many."""
        content = msgspec.msgpack.decode(self._real()[HEADER_NBYTES:])
        place = content
        while True:
            key = self._rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if not (isinstance(inner, dict | list) and inner and self._rng.random() < 0.8):
                break
            place = inner
        what = self._rng.random()
        if what < 0.7 or not isinstance(place, dict):
            place[key] = self._rng.choice(_VALUES)
        elif what < 0.85:
            del place[key]
        else:
            place[self._rng.choice(("extra", "", "type "))] = self._rng.choice(_VALUES)
        return (seal(msgspec.msgpack.encode(content)),)

    def _other_version(self) -> Parts:
        version = self._rng.choice([v for v in range(256) if v != PROTOCOL_VERSION])
        return (b"PD" + bytes((version,)) + self._real()[3:],)

    def _huge_length(self) -> Parts:
        data, at = self._real(), self._rng.randrange(HEADER_NBYTES, HEADER_NBYTES + 60)
        return self._damaged(data[:at] + self._rng.choice(_LENGTHS) + data[at:])

    def _other_parts(self) -> Parts:
        return tuple(self._rng.choice((b"", b"x", self._real())) for _ in range(self._rng.choice((2, 3, 8, 50))))

    def _again(self) -> Parts:
        """A message as it is, or anything that was sent before."""
        return (self._rng.choice(self._sent),)

    def _deep(self) -> Parts:
        nested = self._rng.choice((b"\x91", b"\x81\xa1x")) * self._rng.choice((500, 50_000))
        return (seal(nested + b"\xc0"),)

    def _large(self) -> Parts:
        """Far too many bytes: in a field that nobody knows, or in a manifest that would be read."""
        nbytes = self._rng.choice((MAX_SMALL_FRAME_NBYTES - 100, MAX_SMALL_FRAME_NBYTES + 1, 1 << 20))
        contents = [msgspec.msgpack.decode(frame[HEADER_NBYTES:]) for frame in self._frames]
        manifests = [content for content in contents if "manifest" in content]
        content = self._rng.choice([{"type": "Quiesced", "pad": b"\0" * nbytes}, *manifests])
        if "manifest" in content:
            components = content["manifest"]["components"]
            content["manifest"]["components"] = [{**components[0], "layer_ids": [1 << 40] * 600}] * 64
        return (seal(msgspec.msgpack.encode(content)),)
