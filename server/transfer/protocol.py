"""The PD control protocol: one struct per message. How they are written on the wire is in :mod:`.frames`."""

from __future__ import annotations

import enum
from typing import Annotated, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Meta

from server.failure import Failure, FailureKind
from server.transfer.manifest import Count, Incarnation, Manifest, Name, Positive, ShortText
from server.transfer.parts import PART_NBYTES

MAX_FRAME_NBYTES = 8 << 20
"""Cap of a ``Reserve`` (a prompt of a million tokens is 4 MiB)."""
MAX_SMALL_FRAME_NBYTES = 256 << 10
"""Cap of every other message."""
MAX_ROOM = 2**63 - 1
PROBE_BLOCK_NBYTES = 1024
"""Bytes that one readiness probe writes."""

RoomId = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Reason = Annotated[str, Meta(max_length=1000)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
ClockReading = Annotated[float, Meta(ge=0.0, le=1e12)]
TraceParent = Annotated[str, Meta(max_length=55, pattern="^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
"""The W3C header of this name."""
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenBias = tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]]
BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=1024)]
Salt = Annotated[str, Meta(max_length=1024)]
"""Separates tenants: what was kept for one salt is never found for another."""
PageSpan = tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], Annotated[int, Meta(ge=1, le=2**31 - 1)]]
"""Pages ``first .. stop - 1`` of a request."""
MAX_HELD_SPANS = 1024
ItemIds = Annotated[tuple[Annotated[int, Meta(ge=1, le=2**31 - 1)], ...], Meta(max_length=1 << 17)]


class Writes(enum.StrEnum):
    """What is known about a room's writes into the decode node's memory."""

    SETTLING = "settling"
    """Some may still land; ``Quiesced`` follows when none can."""
    UNKNOWN = "unknown"
    """At least one piece timed out or lost its connection: only a fence makes the memory safe again."""


class RemotePhase(enum.StrEnum):
    """What the prefill node is doing with a room."""

    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of every message; the class name is its ``type`` on the wire."""


class Register(Message, frozen=True, tag="Register"):
    """D -> P, first on a connection: ``manifest`` describes D and its transport session for this P.

    ``registration`` is D's number for it, higher than all before.
    """

    registration: Positive
    manifest: Manifest


class Registered(Message, frozen=True, tag="Registered"):
    """P -> D: accepted, also if it was accepted before. ``manifest`` describes P."""

    registration: Positive
    manifest: Manifest


class Refused(Message, frozen=True, tag="Refused"):
    """P -> D: not accepted. ``field`` differs; ``ours`` is P's value and ``theirs`` D's.

    ``registration`` is 0 for a frame of another version, in which P does not look for one.
    """

    registration: Count
    field: ShortText
    ours: Reason
    theirs: Reason


class Ping(Message, frozen=True, tag="Ping"):
    """D -> P every second. ``decode`` and ``registration`` say which registration D believes in."""

    decode: Incarnation
    registration: Positive


class Pong(Message, frozen=True, tag="Pong"):
    """P -> D, the answer to ``Ping``, and to a ``Register`` that is over. ``prefill`` is P's incarnation.

    ``registered`` False: P does not have this ``registration`` and never will again. D ends it and begins another.
    """

    prefill: Incarnation
    registration: Positive
    registered: bool


class Registration(NamedTuple):
    """One registration: the incarnations of P and D, and its ``number`` among those of D."""

    prefill: str
    decode: str
    number: int


class PeerMessage(Message, frozen=True):
    """Base of what is said inside one registration: the incarnations of both, and D's number for it."""

    prefill: Incarnation
    decode: Incarnation
    registration: Positive


def registration_of(message: PeerMessage) -> Registration:
    """The registration that ``message`` belongs to."""
    return Registration(message.prefill, message.decode, message.registration)


class Probe(PeerMessage, frozen=True, tag="Probe"):
    """D -> P: write :data:`PROBE_BLOCK_NBYTES` random bytes at ``offset`` of D's probe region; ``nonce`` comes back."""

    nonce: Count
    offset: Annotated[int, Meta(ge=0, le=4096 - PROBE_BLOCK_NBYTES)]


class ProbeDone(PeerMessage, frozen=True, tag="ProbeDone"):
    """P -> D: the probe write ended.

    ``reason`` is empty if it was applied; ``digest`` is xxh3_64 of the bytes written.
    """

    nonce: Count
    digest: int
    reason: Reason


class RoomMessage(PeerMessage, frozen=True):
    """Base of everything about one request: ``room`` names the request, ``epoch`` D's reservation attempt for it."""

    room: RoomId
    epoch: RoomId


class RoomIds(TypedDict):
    """The fields of a :class:`RoomMessage`, to build an answer from."""

    prefill: str
    decode: str
    registration: int
    room: int
    epoch: int


def room_ids(registration: Registration, room: int, epoch: int) -> RoomIds:
    """The fields of every message about ``room`` in ``registration``."""
    prefill, decode, number = registration
    return {"prefill": prefill, "decode": decode, "registration": number, "room": room, "epoch": epoch}


def ids_of(message: RoomMessage) -> RoomIds:
    """Whom and which room ``message`` is about."""
    return room_ids(registration_of(message), message.room, message.epoch)


class WireGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the whole answer must match; the fields are those of ``Grammar``."""

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(max_length=1 << 16)]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All sampling parameters, field for field those of ``SamplingParams``: P chooses the first token with them."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)]
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)]
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None
    stop: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=64)]
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)]
    ignore_eos: bool
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    logit_bias: Annotated[tuple[TokenBias, ...], Meta(max_length=1024)] = ()
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=1024)] = ()
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=4096)] | None = None
    grammar: WireGrammar | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class RoomRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request itself: ``request_id`` for the logs, ``prompt`` as raw little-endian int32 ids, and how to sample."""

    request_id: ShortText
    prompt: Annotated[bytes, Meta(min_length=4, max_length=MAX_FRAME_NBYTES)]
    sampling: Sampling
    salt: Salt = ""


class RoutedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Instead of :class:`RoomRequest`: a router sends P the same request over HTTP, in this room.

    P takes the prompt from there, if its ``n_tokens`` ids have this ``prompt_hash`` (xxh3_128 over them as
    little-endian int32), and ``sampling`` from here: D's seed and D's bound on the answer.
    """

    request_id: ShortText
    n_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    prompt_hash: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sampling: Sampling
    salt: Salt = ""


class Waiting(RoomMessage, frozen=True, tag="Waiting"):
    """D -> P, at once and then every second while a room that a router chose has no memory on D: a sign of life."""


class RequestArrived(RoomMessage, frozen=True, tag="RequestArrived"):
    """P -> D, when the router's request for a ``Waiting`` room has come over HTTP: only now D takes memory for it."""


class Reserve(RoomMessage, frozen=True, tag="Reserve"):
    """D -> P: compute this prompt and write its state here.

    ``slot`` and ``pages`` are D's memory, page ``j`` for positions ``j * page_size ..``, just enough for the prompt.
    ``components`` are the names D wants. ``silence_s``: D gives the room up after this long without a sign of life.
    ``traceparent`` is the span of D's that P's part belongs to, if the request is traced.

    ``offered``: D holds complete pages for the first tokens of the prompt, and these are their page digests, 8 bytes
    each, from page 0 on. ``pages`` are for all pages all the same: what P does not confirm as held it writes there.
    """

    slot: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    pages: ItemIds
    components: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]
    request: RoomRequest | RoutedRequest
    silence_s: Seconds
    traceparent: TraceParent | None = None
    offered: Annotated[bytes, Meta(max_length=8 << 17)] = b""


class Reserved(RoomMessage, frozen=True, tag="Reserved"):
    """P -> D: the room is known and waits for its turn."""


class Progress(RoomMessage, frozen=True, tag="Progress"):
    """P -> D, at least every second: a sign of life. ``n_computed`` prompt tokens are done."""

    phase: RemotePhase
    n_computed: Count


class PromptLogprobsPart(RoomMessage, frozen=True, tag="PromptLogprobsPart"):
    """P -> D, in a room whose ``prompt_logprobs`` is set, and again until D has it: what the prompt's tokens at the
    positions from ``start`` on would have been given.

    ``rows`` are those of :class:`server.engine.prompt_logprobs.PromptLogprobs`, one behind the other.
    """

    start: Positive
    rows: Annotated[bytes, Meta(min_length=1, max_length=PART_NBYTES)]


class PromptLogprobsReceived(RoomMessage, frozen=True, tag="PromptLogprobsReceived"):
    """D -> P, the answer to every ``PromptLogprobsPart``: the rows of all positions before ``stop`` are there."""

    stop: Positive


class SentPromptLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was sent in all of a room's parts: ``n_rows`` rows, with ``digest`` (xxh3_64) over them."""

    n_rows: Count
    digest: int


class Sent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What D has of one component: logical rows ``start .. stop - 1`` (entries or positions). Of these ``held_nbytes``
    lie in the pages that ``Done`` says D holds, and ``nbytes`` were written.

    ``start == stop`` declares a component empty. ``digest`` and ``held_digest`` are of the written and of the held
    parts in P's memory: xxh3_64 over the parts' own xxh3_64, 8 bytes each, ascending. A page is a part, a slot is one.
    """

    component: Name
    start: Count
    stop: Count
    nbytes: Count
    digest: int
    held_nbytes: Count
    held_digest: int


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where P's time went, in seconds of its clock.

    ``received_at`` it got the ``Reserve``. From then until it sent ``Done`` there are three phases that touch each
    other: ``queued_s``, ``prefill_s`` and ``transfer_s``. Of the second one the engine computed for ``compute_s``, in
    ``chunks`` steps, and took digests for ``digest_s``. ``writing_s`` is how long a batch of pieces was under way.
    """

    received_at: ClockReading
    queued_s: Seconds
    prefill_s: Seconds
    transfer_s: Seconds
    compute_s: Seconds
    digest_s: Seconds
    writing_s: Seconds
    chunks: Count


class Done(RoomMessage, frozen=True, tag="Done"):
    """P -> D, only after every piece ended applied and every ``PromptLogprobsPart`` was answered, and again until
    answered.

    ``n`` prompt tokens, ``sent`` one entry per component. ``pieces`` are contiguous writes by component, or ``pages``
    where several components of whole pages are written at once.

    ``held`` are the pages that D had offered, and that are the same in P's memory: they were not written. The first
    ``n_reused`` tokens were not computed, but found in P's own cache.
    """

    n: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    sent: Annotated[tuple[Sent, ...], Meta(min_length=1, max_length=64)]
    pieces: Annotated[dict[Name, Count], Meta(max_length=65)]
    timings: Timings
    held: Annotated[tuple[PageSpan, ...], Meta(max_length=MAX_HELD_SPANS)] = ()
    n_reused: Count = 0
    prompt_logprobs: SentPromptLogprobs | None = None


class Committed(RoomMessage, frozen=True, tag="Committed"):
    """D -> P, the answer to ``Done``: everything agrees, D goes on; P may forget the room."""


class Rejected(RoomMessage, frozen=True, tag="Rejected"):
    """D -> P, the other answer to ``Done``: ``component`` (or empty) is not what it must be. An ``Abort`` follows."""

    component: Annotated[str, Meta(max_length=64)]
    reason: Reason


class Failed(RoomMessage, frozen=True, tag="Failed"):
    """P -> D, at once and again until D's ``Abort``: the room is over because of ``failure``.

    ``component`` names the state at fault, or is empty. ``writes`` says what D may still expect to land in its memory.
    """

    code: Name
    reason: Reason
    kind: FailureKind
    component: Annotated[str, Meta(max_length=64)]
    writes: Writes

    @property
    def failure(self) -> Failure:
        return Failure(self.code, self.reason, self.component, sent_kind=self.kind)


class Abort(RoomMessage, frozen=True, tag="Abort"):
    """D -> P, again until answered: the room is over.

    Answered by ``Quiesced``, or by ``Failed`` with writes ``unknown``.
    """

    reason: Reason


class Quiesced(RoomMessage, frozen=True, tag="Quiesced"):
    """P -> D: no write of this room is or will be under way, so D may use its memory again."""


FromDecode = Register | Ping | Probe | Waiting | Reserve | PromptLogprobsReceived | Committed | Rejected | Abort
FromPrefill = (
    Registered | Refused | Pong | ProbeDone | RequestArrived | Reserved | Progress | PromptLogprobsPart | Done | Failed
    | Quiesced
)  # fmt: skip
AnyMessage = FromDecode | FromPrefill


def clip(text: str, most: int = 1000) -> str:
    """A text cut to the ``most`` characters that the wire carries of it."""
    return text if len(text) <= most else text[: most - 3] + "..."
