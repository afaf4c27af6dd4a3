"""Real messages of either side to start from."""

from __future__ import annotations

from server.cache.digest import NOTHING
from server.failure import FailureKind
from server.transfer.frames import pack_tokens
from server.transfer.manifest import Manifest
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
    PromptLogprobsPart,
    PromptLogprobsReceived,
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
    room_ids,
)

REGISTRATION = 2
"""The number that the false decode nodes register with."""
_NUMBERS = (1, REGISTRATION)
_NO_NUMBER = 1 << 40
"""A registration that there is not. A ``Pong`` that denies the real one would make the decode node connect anew, and
what waits in the old connection is lost."""
ROOMS = (0, 1, 7, MAX_ROOM)
_SAMPLING = Sampling(4, 0, 0.5, 0.9, 3, -5, ("stop",), (1, 2), False, 3)
_TIMINGS = Timings(5.0, 0.0, 0.12, 0.02, 0.1, 0.01, 0.02, 1)


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
            PromptLogprobsReceived(**ids, stop=1 + room % 40),
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
            PromptLogprobsPart(**ids, start=1, rows=bytes(24)),
            Done(**ids, n=3, sent=(Sent("swa", 0, 3, 96, 2**64 - 1, 0, NOTHING),), pieces={"swa": 4}, timings=_TIMINGS),
            Failed(**ids, code="x", reason="fuzz", kind=FailureKind.INTERNAL, component="", writes=Writes.UNKNOWN),
            Quiesced(**ids),
        ]
    return messages
