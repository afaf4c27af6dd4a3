"""The record of one room as it is read: what ``GET /rooms`` answers, and what metrics and traces are made of.

Times are whole microseconds since the record began, so that sums are exact: every phase ends at the reading at which
the next one begins. docs/rooms.md has every field, with an example.
"""

from __future__ import annotations

import enum

import msgspec


class PhaseName(enum.StrEnum):
    """What a request waits for. In this order, but for a second attempt, which begins again with ``QUEUE``."""

    RECEIVE = "receive"
    """The decode node reads and checks the HTTP request and makes token ids of its text."""
    PAIR = "pair"
    """In a room that a router chose: until the other node has its half."""
    QUEUE = "queue"
    """For a slot and pages on the decode node."""
    RESERVE = "reserve"
    """``Reserve`` is on its way to the prefill node."""
    PREFILL_QUEUE = "prefill_queue"
    """For a slot and pages on the prefill node."""
    PREFILL = "prefill"
    """The prompt is computed, beside other prompts; full pages are sent meanwhile."""
    TRANSFER = "transfer"
    """What the prompt's end has left to send, until all of it is applied."""
    DONE = "done"
    """``Done`` is on its way to the decode node."""
    VERIFY = "verify"
    """The decode node checks what has arrived."""
    COMMIT = "commit"
    """On the prefill node: until the decode node has answered ``Done``."""
    FIRST_TOKEN = "first_token"
    """The engine takes the request, and its first token goes to the client."""
    DECODE = "decode"
    """From the first token to the last one."""


class Phase(msgspec.Struct, frozen=True):
    """One phase of the ``attempt`` (1, 2, ...) on ``node`` (``decode`` or ``prefill``: whose clock measured it).

    ``end_us`` is None in the phase that a request is in.
    """

    name: PhaseName
    node: str
    attempt: int
    start_us: int
    end_us: int | None


class FailureRecord(msgspec.Struct, frozen=True):
    """Why something failed: a code of :data:`server.failure.KINDS` and a sentence; ``component`` may be empty."""

    code: str
    reason: str
    component: str


class Attempt(msgspec.Struct, frozen=True):
    """One reservation of memory. ``peer`` is the other node: ``host:port`` of a prefill node, the first 8 digits of a
    decode node's incarnation, or ``local``. ``n_pages`` and ``slot`` are of this node's memory.
    """

    epoch: int
    peer: str
    slot: int | None
    n_pages: int
    failure: FailureRecord | None


class Tokens(msgspec.Struct, frozen=True):
    """``max_new`` were asked for at most. ``generated`` came in ``steps`` outputs, from ``proposed`` draft tokens of
    which ``accepted`` stood. ``reused`` of the prompt's were not computed, but found in the prefill node's cache.
    """

    prompt: int
    max_new: int
    generated: int
    steps: int
    proposed: int
    accepted: int
    reused: int


class Transfer(msgspec.Struct, frozen=True):
    """What moved. ``nbytes`` by component, beside ``held_nbytes`` that the decode node had already; ``pieces`` are
    contiguous writes, by component, or ``pages`` for whole pages of several components. Some of it was under way for
    ``writing_us``, which is ``gb_s``. ``compute_us`` and ``digest_us`` are the engine's part of the phase ``prefill``,
    in ``chunks`` steps.
    """

    nbytes: dict[str, int]
    held_nbytes: dict[str, int]
    pieces: dict[str, int]
    writing_us: int
    gb_s: float | None
    compute_us: int
    digest_us: int
    chunks: int


class Clocks(msgspec.Struct, frozen=True):
    """How the prefill node's phases were put on the decode node's clock: by the times of ``Reserve`` and ``Done``.

    The prefill node's clock is ahead by ``offset_us``, give or take ``uncertainty_us``: how the two messages share the
    time that neither node accounts for cannot be known, so each has half of it.
    """

    offset_us: int
    uncertainty_us: int


class RoomRecord(msgspec.Struct, frozen=True):
    """One request on ``node``. ``room`` is a string: ids exceed what a JSON number keeps exact.

    ``phase`` is None when it is over; then ``outcome`` is the finish reason, ``committed`` on a prefill node, or the
    code of the ``failure``. ``began_unix_us`` is the wall clock at microsecond 0. The phases that end up to ``ttft_us``
    sum to it, and all phases to ``total_us``.
    """

    room: str
    node: str
    request_id: str
    began_unix_us: int
    phase: PhaseName | None
    outcome: str | None
    failure: FailureRecord | None
    ttft_us: int | None
    total_us: int | None
    phases: tuple[Phase, ...]
    attempts: tuple[Attempt, ...]
    tokens: Tokens
    transfer: Transfer | None
    clocks: Clocks | None
    trace_id: str | None


class Refusal(msgspec.Struct, frozen=True):
    """A request that never got a room: refused at once with ``failure``."""

    request_id: str
    room: str | None
    unix_us: int
    failure: FailureRecord


class RoomList(msgspec.Struct, frozen=True):
    """The answer of ``GET /rooms``: newest first. ``kept`` is how many ended rooms the node keeps at most."""

    node: str
    kept: int
    running: tuple[RoomRecord, ...]
    ended: tuple[RoomRecord, ...]
    refused: tuple[Refusal, ...]
