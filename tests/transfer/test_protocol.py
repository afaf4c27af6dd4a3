"""The wire: what goes in comes out, and nothing else is obeyed."""

from __future__ import annotations

import random
from dataclasses import fields

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.grammar import MAX_GRAMMAR_CHARS
from server.engine.request import SamplingParams
from server.failure import FailureKind
from server.transfer import protocol
from server.transfer.frames import (
    HEADER_NBYTES,
    ProtocolError,
    VersionMismatch,
    decode,
    encode,
    pack_tokens,
    seal,
    unpack_tokens,
)
from server.transfer.manifest import PROTOCOL_VERSION
from server.transfer.protocol import (
    MAX_FRAME_NBYTES,
    MAX_ROOM,
    MAX_SMALL_FRAME_NBYTES,
    AnyMessage,
    Done,
    Failed,
    Ping,
    Pong,
    Quiesced,
    Register,
    Registration,
    RequestArrived,
    Reserve,
    RoomRequest,
    RoutedRequest,
    Sampling,
    Sent,
    Timings,
    Waiting,
    WireGrammar,
    Writes,
    room_ids,
)
from tests.transfer.support import make_manifest

IDS = room_ids(Registration("a" * 32, "b" * 32, 3), MAX_ROOM, 7)
SAMPLING = Sampling(
    *(4, 0, 0.5, 0.9, 3, -5, ("stop",), (1, 2), False, None, 0.5, -0.5, 1.1, 0.1),
    *(((7, -3.5),), ((1, 2), (3,)), (4, 5), WireGrammar("regex", "a+")),
)


def reserve(**changes: object) -> Reserve:
    request = RoomRequest("request-1", pack_tokens([1, 2, 3]), SAMPLING)
    message = Reserve(**IDS, slot=1, pages=(3, 1), components=("swa",), request=request, silence_s=5.0)
    return msgspec.structs.replace(message, **changes)


def routed(**changes: object) -> Reserve:
    """A ``Reserve`` of a room that a router named."""
    return reserve(request=RoutedRequest("request-1", 3, bytes(16), SAMPLING), **changes)


MESSAGES: list[AnyMessage] = [
    Register(1, make_manifest("decode", session="127.0.0.1:15000")),
    Ping("b" * 32, 1),
    Pong("a" * 32, 1, registered=False),
    Waiting(**IDS),
    RequestArrived(**IDS),
    reserve(),
    routed(),
    Done(
        **IDS,
        n=3,
        sent=(Sent("swa", 0, 3, 96, 2**64 - 1, 512, 5),),
        pieces={"pages": 3, "swa": 1},
        timings=Timings(5.0, 0.0, 1.5, 0.2, 1.3, 0.1, 0.2, 2),
    ),
    Failed(
        **IDS,
        code="deadline",
        reason="it took too long",
        kind=FailureKind.DEADLINE,
        component="swa",
        writes=Writes.UNKNOWN,
    ),
    Quiesced(**IDS),
]


def raw(message: AnyMessage) -> dict[str, object]:
    """A message as the map that is on the wire."""
    found: dict[str, object] = msgspec.msgpack.decode(encode(message)[HEADER_NBYTES:])
    return found


def frame(content: object, version: int = PROTOCOL_VERSION) -> bytes:
    sealed = seal(msgspec.msgpack.encode(content))
    return sealed[:2] + bytes((version,)) + sealed[3:]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_an_unknown_field_is_refused(message: AnyMessage) -> None:
    with pytest.raises(ProtocolError, match="unknown field"):
        decode(frame(raw(message) | {"extra": 1}))


def test_an_unknown_field_inside_the_manifest_or_the_sampling_is_refused() -> None:
    register, reserved = raw(MESSAGES[0]), raw(reserve())
    register["manifest"]["extra"] = 1  # type: ignore[index]
    reserved["request"]["sampling"]["beam"] = 4  # type: ignore[index]
    for content in (register, reserved):
        with pytest.raises(ProtocolError, match="unknown field"):
            decode(frame(content))


@pytest.mark.parametrize(
    "change",
    [
        {"room": -1},
        {"room": 2**63},
        {"room": "7"},
        {"room": 1.5},
        {"epoch": -1},
        {"registration": 0},
        {"registration": 2**63},
        {"registration": "3"},
        {"prefill": "A" * 32},
        {"decode": "b" * 31},
        {"slot": 0},
        {"pages": [0]},
        {"pages": "ab"},
        {"components": []},
        {"silence_s": -1.0},
        {"type": "Reserve2"},
        {"type": None},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(frame(raw(reserve()) | change))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    "change",
    [{"n_tokens": 0}, {"prompt_hash": bytes(15)}, {"prompt_hash": bytes(17)}, {"prompt": b"abcd"}, {"type": "Other"}],
    ids=str,
)
def test_a_routed_request_has_a_length_and_a_whole_hash_and_no_prompt(change: dict[str, object]) -> None:
    content = raw(routed())
    content["request"] |= change  # type: ignore[operator]
    with pytest.raises(ProtocolError):
        decode(frame(content))


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0.0},
        {"min_p": 1.5},
        {"logit_bias": [[1, 101.0]]},
        {"logit_bias": [[-1, 1.0]]},
        {"logit_bias": [[1, 1.0]] * 1025},
        {"bad_words": [[]]},
        {"bad_words": [[1]] * 1025},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1] * 4097},
        {"grammar": {"kind": "python", "text": "a"}},
        {"grammar": {"kind": "regex", "text": "a" * (MAX_GRAMMAR_CHARS + 1)}},
        {"grammar": {"kind": "regex", "text": "a", "more": 1}},
    ],
    ids=lambda change: "".join(f"{name} {value}"[:40] for name, value in change.items()),
)
def test_a_sampling_parameter_out_of_range_is_refused(change: dict[str, object]) -> None:
    content = raw(reserve())
    content["request"]["sampling"] |= change  # type: ignore[index]
    with pytest.raises(ProtocolError) as caught:
        decode(frame(content))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty", "min_p"])
def test_a_sampling_parameter_that_is_no_number_is_refused(name: str) -> None:
    content = raw(reserve())
    content["request"]["sampling"][name] = float("nan")  # type: ignore[index]
    with pytest.raises(ProtocolError):
        decode(frame(content))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_flipped_bit_anywhere_behind_the_version_is_noticed(message: AnyMessage) -> None:
    whole = encode(message)
    for place in range(3, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ProtocolError) as caught:
            decode(bytes(damaged))
        assert caught.value.kind == "corrupt"


def test_another_version_is_told_apart_from_garbage() -> None:
    with pytest.raises(VersionMismatch) as caught:
        decode(frame({"type": "Hello"}, version=PROTOCOL_VERSION + 1))
    assert caught.value.theirs == PROTOCOL_VERSION + 1


def test_frames_over_their_cap_are_refused_on_both_sides() -> None:
    big = Failed(
        **IDS,
        code="x",
        reason="y" * (MAX_SMALL_FRAME_NBYTES + 1),
        kind=FailureKind.INTERNAL,
        component="",
        writes=Writes.SETTLING,
    )
    with pytest.raises(ProtocolError, match="over the cap") as caught:
        encode(big)
    assert caught.value.kind == "oversize"
    for nbytes in (MAX_FRAME_NBYTES, MAX_SMALL_FRAME_NBYTES):
        with pytest.raises(ProtocolError):
            decode(frame({"type": "Quiesced", "pad": b"0" * nbytes}))
    with pytest.raises(ProtocolError, match="over the cap"):
        encode(reserve(request=RoomRequest("r", bytes(MAX_FRAME_NBYTES), SAMPLING)))
    million = reserve(request=RoomRequest("r", pack_tokens(range(1 << 20)), SAMPLING))
    assert decode(encode(million)) == million


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for content in (data, seal(data)):
        with pytest.raises(ProtocolError):
            decode(content)


def test_a_damaged_message_is_refused_or_another_valid_message() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        data = bytearray(encode(rng.choice(MESSAGES)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data))
        except ProtocolError:
            continue


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(seal(b"\x91" * 100_000 + b"\xc0"))


def test_token_ids_are_little_endian_int32() -> None:
    assert pack_tokens([1, 2**31 - 1]) == b"\x01\0\0\0\xff\xff\xff\x7f"
    assert unpack_tokens(pack_tokens([5, 0, 77])) == (5, 0, 77)
    with pytest.raises(ProtocolError):
        unpack_tokens(b"123")


def test_sampling_on_the_wire_has_every_field_of_the_engine_s_parameters() -> None:
    assert [f.name for f in msgspec.structs.fields(protocol.Sampling)] == [f.name for f in fields(SamplingParams)]
