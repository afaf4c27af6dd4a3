"""Real messages of either side to start from, made with what the nodes tell of themselves in ``/server_info``."""

from __future__ import annotations

from typing import Any

from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry
from server.model.config import load_config
from server.model.state import state_components
from server.node.options import BUNDLED_MODEL
from server.transfer.manifest import Manifest, ModelIdentity, TransportIdentity, build_manifest
from server.transfer.protocol import (
    MAX_ROOM,
    Abort,
    AnyMessage,
    Committed,
    Done,
    Failed,
    Ping,
    Pong,
    Probe,
    ProbeDone,
    Progress,
    Quiesced,
    Refused,
    Register,
    Registered,
    Registration,
    Rejected,
    RemotePhase,
    RequestArrived,
    Reserve,
    Reserved,
    RoomRequest,
    RoutedRequest,
    Sampling,
    Sent,
    Timings,
    Waiting,
    Writes,
    pack_tokens,
    room_ids,
)

NOWHERE = "127.0.0.1:1"
"""A transport session that nobody has: what is written there fails."""
REGISTRATION = 2
"""The number that the false decode nodes register with."""
_NUMBERS = (1, REGISTRATION)
_NO_NUMBER = 1 << 40
"""A registration that there is not. A ``Pong`` that denies the real one would make the decode node connect anew, and
what waits in the old connection is lost."""
_SAMPLING = Sampling(4, 0, 0.5, 0.9, 3, -5, ("stop",), (1, 2), False, 3)
_TIMINGS = Timings(0.0, 0.1, 0.01, 0.02)


def decode_manifest(info: dict[str, Any], incarnation: str) -> Manifest:
    """A decode node that fits the prefill node whose ``/server_info`` is ``info``."""
    config = load_config(BUNDLED_MODEL)
    components = state_components(config, info["dtype"], 0, draft=False)
    geometry = CacheGeometry(info["page_size"], 9, 5, config.sliding_window, 0, components)
    layout = ArenaLayout.from_geometry(geometry)
    return build_manifest(
        "decode",
        incarnation,
        ModelIdentity(info["model_fingerprint"], info["tokenizer_fingerprint"], info["dtype"]),
        TransportIdentity("mooncake", "any", "tcp"),
        layout,
        1 << 40,
        spec_tokens=0,
        components=layout.names,
        session=NOWHERE,
    )


def from_decode(prefill: str, decode: str, manifest: Manifest, rooms: tuple[int, ...]) -> list[AnyMessage]:
    """Everything that a decode node says, about ``rooms``, in registration :data:`REGISTRATION` and an earlier one."""
    messages: list[AnyMessage] = [
        Register(REGISTRATION, manifest),
        Register(REGISTRATION - 1, manifest),
        Ping(decode, REGISTRATION),
        Ping(decode, REGISTRATION - 1),
        Probe(prefill, decode, REGISTRATION, 5, 1024),
    ]
    for i, room in enumerate(rooms):
        ids = room_ids(Registration(prefill, decode, REGISTRATION - i % 2), room, 1 + room % 3)
        request: RoomRequest | RoutedRequest = RoomRequest(f"fuzz-{room}", pack_tokens(range(10, 40)), _SAMPLING)
        if i % 3 == 2:
            request = RoutedRequest(f"fuzz-{room}", 30, bytes(16), _SAMPLING)
        names = tuple(entry.name for entry in manifest.components)
        messages += [
            Waiting(**ids),
            Reserve(**ids, slot=1 + room % 4, pages=(1 + room % 8,), components=names, request=request, silence_s=5.0),
            Committed(**ids),
            Rejected(**ids, component="swa", reason="fuzz"),
            Abort(**ids, reason="fuzz"),
        ]
    return messages


def from_prefill(prefill: str, decode: str, manifest: Manifest, rooms: tuple[int, ...]) -> list[AnyMessage]:
    """Everything that a prefill node says, about ``rooms``; its manifest must not fit the decode node."""
    messages: list[AnyMessage] = [
        *(Registered(number, manifest) for number in _NUMBERS),
        *(Refused(number, "model", "a", "b") for number in (0, *_NUMBERS)),
        Pong(prefill, _NO_NUMBER, registered=True),
        ProbeDone(prefill, decode, 1, 1, 2**64 - 1, ""),
    ]
    for i, room in enumerate(rooms):
        ids = room_ids(Registration(prefill, decode, _NUMBERS[i % 2]), room, 1)
        messages += [
            RequestArrived(**ids),
            Reserved(**ids),
            Progress(**ids, phase=RemotePhase.PREFILL, n_computed=5),
            Done(**ids, n=3, sent=(Sent("swa", 0, 3, 96, 2**64 - 1),), pieces=4, timings=_TIMINGS),
            Failed(**ids, code="x", reason="fuzz", status=500, component="", writes=Writes.UNKNOWN),
            Quiesced(**ids),
        ]
    return messages


ROOMS = (0, 1, 7, MAX_ROOM)
