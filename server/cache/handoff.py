"""The hand-off row: what the prefill node says of a prompt beside its state, one fixed struct in the request's slot."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from server.cache.arena import TORCH_DTYPES, Arena
from server.cache.layout import Placement, Run
from server.cache.specs import HANDOFF, STREAMS_OFFSET, LayoutError

HANDOFF_VERSION = 1
MAX_TOP = 20
_HEAD = struct.Struct("<IIQQI16sid")  # version, dtype code, room, epoch, n, prompt hash, first token, its logprob
_TOP = struct.Struct("<id")
_HEAD_NBYTES = 64
_DTYPE_CODES = {"float32": 0, "bfloat16": 1}


@dataclass(frozen=True)
class HandoffHead:
    """The row without the streams: ``n`` prompt tokens with ``prompt_hash``, and the token the prefill node chose for
    position n with its log probability and the best alternatives.
    """

    room: int
    epoch: int
    n: int
    prompt_hash: bytes
    first_token: int
    first_logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Handoff(HandoffHead):
    """The whole row. ``streams`` ``[hc_mult, hidden]`` are the target's hidden streams of position n - 1, before the
    head collapse, which a draft layer's first step reads.
    """

    streams: torch.Tensor


def prompt_hash(ids: Sequence[int]) -> bytes:
    """xxh3_128 over the ids as little-endian int32: 16 bytes that name a prompt."""
    return packed_prompt_hash(np.asarray(ids, dtype="<i4").tobytes())


def packed_prompt_hash(ids: bytes) -> bytes:
    """:func:`prompt_hash` of ids that are little-endian int32 already."""
    return xxhash.xxh3_128(ids).digest()


def write_handoff(arena: Arena, placement: Placement, handoff: Handoff) -> None:
    """Writes the row of ``placement``'s slot. Raises :class:`LayoutError` if it does not fit the struct."""
    if len(handoff.top) > MAX_TOP:
        raise LayoutError(f"a hand-off row holds {MAX_TOP} alternatives, got {len(handoff.top)}")
    dtype = str(handoff.streams.dtype).removeprefix("torch.")
    head = _HEAD.pack(
        HANDOFF_VERSION, _DTYPE_CODES[dtype], handoff.room, handoff.epoch, handoff.n, handoff.prompt_hash,
        handoff.first_token, handoff.first_logprob,
    )  # fmt: skip
    top = struct.pack("<I", len(handoff.top)) + b"".join(_TOP.pack(token, logprob) for token, logprob in handoff.top)
    streams = handoff.streams.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    data = (head.ljust(_HEAD_NBYTES, b"\0") + top).ljust(STREAMS_OFFSET, b"\0") + streams
    arena.write(_row(arena, placement), data)


def read_head(arena: Arena, placement: Placement) -> HandoffHead:
    """Reads the row back, without the streams. Raises :class:`LayoutError` if it is of another version or no hand-off
    row at all.
    """
    return _unpack_head(arena.read([_row(arena, placement)]), placement)[0]


def read_handoff(arena: Arena, placement: Placement, hc_mult: int) -> Handoff:
    """Reads the row back. Raises what :func:`read_head` raises."""
    data = arena.read([_row(arena, placement)])
    head, dtype = _unpack_head(data, placement)
    streams = torch.frombuffer(bytearray(data[STREAMS_OFFSET:]), dtype=TORCH_DTYPES[dtype]).view(hc_mult, -1)
    return Handoff(**vars(head), streams=streams)


def _unpack_head(data: bytes, placement: Placement) -> tuple[HandoffHead, str]:
    """The head of a row, and the name of its streams' element type."""
    version, code, room, epoch, n, digest, first_token, first_logprob = _HEAD.unpack_from(data)
    if version != HANDOFF_VERSION:
        raise LayoutError(f"hand-off row of slot {placement.slot} has version {version}, expected {HANDOFF_VERSION}")
    names = {value: name for name, value in _DTYPE_CODES.items()}
    (n_top,) = struct.unpack_from("<I", data, _HEAD_NBYTES)
    if code not in names or n_top > MAX_TOP:
        raise LayoutError(f"hand-off row of slot {placement.slot} is damaged: dtype code {code}, {n_top} alternatives")
    top = tuple(_TOP.unpack_from(data, _HEAD_NBYTES + 4 + i * _TOP.size) for i in range(n_top))
    return HandoffHead(room, epoch, n, digest, first_token, first_logprob, top), names[code]


def _row(arena: Arena, placement: Placement) -> Run:
    row = arena.layout.component(HANDOFF)
    return Run(row.offset + placement.slot * row.item_stride, row.row_nbytes)
