"""Messages on the wire: the only encoder and decoder.

A frame is ``b"PD" + version byte + xxh3_64 of the rest (little-endian) + msgpack map``; the map's ``type`` names the
message. A frame whose digest is wrong is dropped like a lost one. Unknown types and fields, wrong
types and values out of range are refused, as are frames over the size caps. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from server.transfer.manifest import PROTOCOL_VERSION
from server.transfer.protocol import MAX_FRAME_NBYTES, MAX_SMALL_FRAME_NBYTES, AnyMessage, Reserve

_MAGIC = b"PD"
_PREFIX = _MAGIC + bytes((PROTOCOL_VERSION,))
HEADER_NBYTES = len(_PREFIX) + 8

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class ProtocolError(Exception):
    """A frame that is not a message of this protocol. ``kind`` is a short stable word for the counters."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class VersionMismatch(ProtocolError):
    """A frame of this protocol in another version, ``theirs``."""

    def __init__(self, theirs: int) -> None:
        super().__init__("version", f"protocol_version differs: ours {PROTOCOL_VERSION}, theirs {theirs}")
        self.theirs = theirs


def seal(content: bytes) -> bytes:
    """``content``, a msgpack map, as a frame."""
    return _PREFIX + xxhash.xxh3_64(content).intdigest().to_bytes(8, "little") + content


def encode(message: AnyMessage) -> bytes:
    """A message as one frame. Raises :class:`ProtocolError` (``oversize``) if it is over its cap."""
    frame = seal(_encoder.encode(message))
    cap = MAX_FRAME_NBYTES if isinstance(message, Reserve) else MAX_SMALL_FRAME_NBYTES
    if len(frame) > cap:
        raise ProtocolError("oversize", f"{type(message).__name__} of {len(frame)} bytes is over the cap of {cap}")
    return frame


def decode(frame: bytes) -> AnyMessage:
    """One frame as a message.

    Raises :class:`ProtocolError`: kinds ``oversize``, ``garbage``, ``version``, ``corrupt``, ``malformed``.
    """
    if len(frame) > MAX_FRAME_NBYTES:
        raise ProtocolError("oversize", f"a frame of {len(frame)} bytes is over the cap of {MAX_FRAME_NBYTES}")
    if len(frame) < len(_PREFIX) or frame[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError("garbage", f"a frame of {len(frame)} bytes does not start with {_MAGIC!r}")
    if frame[2] != PROTOCOL_VERSION:
        raise VersionMismatch(frame[2])
    content = memoryview(frame)[HEADER_NBYTES:]
    if xxhash.xxh3_64(content).intdigest() != int.from_bytes(frame[len(_PREFIX) : HEADER_NBYTES], "little"):
        raise ProtocolError("corrupt", f"the content of a frame of {len(frame)} bytes does not have its digest")
    try:
        message: AnyMessage = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"a frame of {len(frame)} bytes is no message: {error}") from error
    if len(frame) > MAX_SMALL_FRAME_NBYTES and not isinstance(message, Reserve):
        raise ProtocolError(
            "oversize", f"{type(message).__name__} of {len(frame)} bytes is over {MAX_SMALL_FRAME_NBYTES}"
        )
    return message


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Token ids as raw little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The inverse of :func:`pack_tokens`. Raises :class:`ProtocolError` if ``data`` is no whole number of ids."""
    if len(data) % 4:
        raise ProtocolError("malformed", f"{len(data)} bytes are no int32 token ids")
    return tuple(np.frombuffer(data, dtype="<i4").tolist())
