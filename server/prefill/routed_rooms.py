"""Rooms that a router chose: one half is a request here over HTTP, the other waits on a decode node; in any order.

When both are there the decode node is sent a ``RequestArrived``. It takes memory and sends its ``Reserve``, and with
that the room gets its turn. The client here is answered, with the first token, when the decode node has committed. What
ends one half ends the other at once; half a room ends by the deadline ``pair_s``.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from server.cache.handoff import prompt_hash
from server.engine.generation import NodeGeneration
from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.request import FinishReason, GenerationRequest, RouteInfo, TokenizerLike, TokenLogprob, TokenOutput
from server.engine.stopping import OutputProcessor
from server.failure import Failure, RequestFailed, internal_error
from server.prefill.decode_peer import DecodePeer
from server.prefill.events import PrefillEvent
from server.prefill.request import PrefillRequest
from server.prefill.room import PrefillPhase, failed_message
from server.telemetry.record import PhaseName
from server.telemetry.rooms import RoomRecords
from server.transfer.protocol import RequestArrived, RoutedRequest, Waiting, Writes, ids_of
from server.transfer.rooms import GivenUp, RoomKey, Tombstones

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
REMEMBER_S = 2.0
"""How long the end of one half is kept for the other: a router sends both at the same time."""


class Side(enum.StrEnum):
    """Which half of a room."""

    HTTP = "http"
    DECODE = "decode"


@dataclass(frozen=True)
class _DecodeHalf:
    """A room that waits on the decode node ``peer``, since ``since``. ``is_again``: it came while the end of an earlier
    half of a room with this id was remembered.
    """

    peer: DecodePeer
    waiting: Waiting
    since: float
    is_again: bool = False

    @property
    def key(self) -> RoomKey:
        return RoomKey.of(self.waiting)


@dataclass(eq=False)
class _HttpHalf:
    """One request over HTTP, which ``came`` at that time. ``alive`` is then, or when a decode node last said that the
    room waits there: ``other``. ``req`` is its room, once there is one. ``is_again`` as above.
    """

    request: GenerationRequest
    room: int
    generation: NodeGeneration
    came: float
    alive: float
    is_again: bool
    other: _DecodeHalf | None = None
    req: PrefillRequest | None = None


@dataclass
class _Ended:
    """The end of the ``side`` half of a room, whose other half had not come. Kept until ``until``.

    It ends one half of the other side, which may be still to come, and no second one (``is_used``). A half of the same
    side belongs to a later room with this id, and so do all that come after it. The ends of those are not remembered
    before ``until``: a client that uses an id again and again fails once by this, not each time.
    """

    side: Side
    failure: Failure
    until: float
    is_used: bool = False


class RoutedRooms:
    """The halves of rooms that have not met, and the clients here of those that have.

    ``step`` hands a room an event; a room that is over here leaves one of ``tombstones``. ``address`` is this node's
    bootstrap ``host:port``, for the clients. ``pair_s`` in seconds, by ``clock``. ``records`` gets those of requests
    that never met a decode node; a room has its own.
    """

    def __init__(
        self,
        step: Callable[[PrefillRequest, PrefillEvent], None],
        tombstones: Tombstones,
        tokenizer: TokenizerLike,
        pair_s: float,
        clock: Callable[[], float],
        records: RoomRecords,
    ) -> None:
        self.address = ""
        self._step = step
        self._tombstones = tombstones
        self._tokenizer = tokenizer
        self._pair_s = pair_s
        self._clock = clock
        self._records = records
        self._http: dict[int, _HttpHalf] = {}
        self._decode: dict[int, _DecodeHalf] = {}
        self._joined: dict[RoomKey, _HttpHalf] = {}
        self._ended: dict[int, _Ended] = {}

    @property
    def n_http(self) -> int:
        """Requests over HTTP that wait for a decode node."""
        return sum(half.req is None for half in self._http.values())

    @property
    def n_decode(self) -> int:
        """Rooms that wait on decode nodes for their request over HTTP."""
        return len(self._decode)

    # --- the client's side --------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> NodeGeneration:
        """Takes a request that came over HTTP, for the room it names.

        Raises :class:`RequestFailed` without a room, for one that another request has, and with whatever the decode
        node's half of the room has failed with.
        """
        if request.routed is None:
            raise RequestFailed(Failure("wrong_role", "this is a prefill node: the request must name a room"))
        room = request.routed.room
        if room in self._http:
            raise RequestFailed(Failure("duplicate_room", f"room {room} is in use by another request"))
        failure, is_again = self._earlier_end(room, Side.HTTP)
        if failure is not None:
            raise _for_client(failure)
        now = self._clock()
        generation = NodeGeneration(lambda: self._client_gone(half), room=room)
        half = self._http[room] = _HttpHalf(request, room, generation, now, now, is_again)
        other = self._decode.pop(room, None)
        if other is not None:
            self._meet(half, other)
        return generation

    def turned_away(self, request: GenerationRequest, failure: Failure) -> None:
        """A request that came over HTTP is not taken: the decode node's half of its room is over too."""
        room = request.routed.room if request.routed is not None else None
        if room is None or room in self._http:
            return
        other = self._decode.pop(room, None)
        if other is not None:
            self.refuse(other.peer, other.waiting, failure)
            return
        _, is_again = self._earlier_end(room, Side.HTTP)
        if not is_again:
            self._remember(room, Side.HTTP, failure)

    def _meet(self, half: _HttpHalf, other: _DecodeHalf) -> None:
        """Both halves are known: the decode node may take memory for the room."""
        half.other, half.alive = other, self._clock()
        other.peer.send(RequestArrived(**ids_of(other.waiting)))

    def _client_gone(self, half: _HttpHalf) -> None:
        self._end(half, Failure("prefill_client_gone", "the client of the prefill node closed its request"))
        half.generation.finish(FinishReason.ABORT)

    def _end(self, half: _HttpHalf, failure: Failure) -> None:
        """Ends both halves, or keeps the failure for the one that is still to come."""
        req, other = half.req, half.other
        self._fail(half, failure)
        if req is not None:
            if req.room.active:
                self._step(req, GivenUp(failure))
        elif other is not None:
            self.refuse(other.peer, other.waiting, failure)
        elif not half.is_again:
            self._remember(half.room, Side.HTTP, failure)

    def _fail(self, half: _HttpHalf, failure: Failure) -> None:
        if half.req is None:
            self._record_alone(half, failure)
        self._let_go(half)
        half.generation.fail(_for_client(failure))

    def _record_alone(self, half: _HttpHalf, failure: Failure) -> None:
        request = half.request
        record = self._records.open(
            half.room,
            request.request_id,
            n_prompt=len(request.prompt_ids),
            max_new=1,
            first=PhaseName.PAIR,
            began=half.came,
            traceparent=request.traceparent,
        )
        self._records.end(record, failure.code, self._clock(), failure)

    def _let_go(self, half: _HttpHalf) -> None:
        """The request is answered: what its room still does does not concern a later one with the same id."""
        if self._http.get(half.room) is half:
            del self._http[half.room]
        if half.req is not None:
            del self._joined[half.req.key]
            half.req = None

    # --- the decode node's side ---------------------------------------------------------------------------------------

    def on_waiting(self, peer: DecodePeer, waiting: Waiting) -> None:
        """The room has no memory on its decode node, which hears how its half here stands, if it has come."""
        half, before = self._http.get(waiting.room), self._decode.get(waiting.room)
        known = half.other if half is not None else before
        if known is not None and known.waiting.decode != waiting.decode:
            self.refuse(peer, waiting, _not_yours(waiting.room))
        elif known is not None and known.waiting.epoch > waiting.epoch:
            pass  # a late copy: that room is over on its decode node
        elif half is not None:
            if half.req is None:
                self._meet(half, _DecodeHalf(peer, waiting, self._clock()))
        elif before is not None:
            self._decode[waiting.room] = replace(before, peer=peer, waiting=waiting)
        else:
            self._on_first_waiting(peer, waiting)

    def _on_first_waiting(self, peer: DecodePeer, waiting: Waiting) -> None:
        failure, is_again = self._earlier_end(waiting.room, Side.DECODE)
        if failure is not None:
            self.refuse(peer, waiting, failure)
            return
        self._decode[waiting.room] = _DecodeHalf(peer, waiting, self._clock(), is_again)
        if len(self._decode) > MAX_REMEMBERED:
            del self._decode[next(iter(self._decode))]  # it is sent again within a second

    def refuse(self, peer: DecodePeer, waiting: Waiting, failure: Failure) -> None:
        """A room that waits on its decode node is over here. A copy of its ``Waiting`` finds the tombstone."""
        self._tombstones.add(RoomKey.of(waiting), failure, clean=True)
        peer.send(failed_message(waiting, failure, Writes.SETTLING))

    def given_up(self, key: RoomKey, failure: Failure) -> None:
        """The decode node gave up a room that waited there."""
        half, other = self._http.get(key.room), self._decode.get(key.room)
        if other is not None and other.key == key:
            self._end_decode(other, failure)
        elif half is not None and half.req is None and half.other is not None and half.other.key == key:
            self._fail(half, failure)

    def _end_decode(self, other: _DecodeHalf, failure: Failure) -> None:
        del self._decode[other.key.room]
        if not other.is_again:
            self._remember(other.key.room, Side.DECODE, failure)

    def on_lost(self, peer: DecodePeer) -> None:
        """A registration is over: what waited in it has to be sent anew."""
        self._decode = {room: other for room, other in self._decode.items() if other.peer is not peer}
        for half in self._http.values():
            if half.other is not None and half.other.peer is peer:
                half.other = None

    def join(self, req: PrefillRequest, refused: Failure | None = None) -> Failure | None:
        """A ``Reserve`` without a prompt has come, and ``req`` is its room. It gets the prompt of the request here.
        Returns why it cannot go on: it is ``refused`` already, or has no such request.
        """
        room = req.key.room
        half = self._http.get(room)
        if half is None:
            reason = f"the request for room {room} is not on the prefill node any more"
            return refused or Failure("prefill_client_gone", reason)
        if half.req is not None or (half.other is not None and half.other.key != req.key):
            return refused or _not_yours(room)
        half.req, self._joined[req.key] = req, half
        req.record.waited_before(PhaseName.PAIR, half.came)
        if refused is not None:
            return refused
        prompt, wanted = half.request.prompt_ids, req.room.reserve.request
        if not isinstance(wanted, RoutedRequest):
            raise TypeError(f"{req.key} has its prompt already")
        if len(prompt) != wanted.n_tokens or prompt_hash(prompt) != wanted.prompt_hash:
            reason = (
                f"the prompts of room {room} differ: {len(prompt)} tokens with hash {prompt_hash(prompt).hex()} "
                f"here, {wanted.n_tokens} tokens with hash {wanted.prompt_hash.hex()} on the decode node"
            )
            return Failure("prompt_mismatch", reason)
        req.request = replace(req.request, prompt_ids=prompt)
        self._keep_scores(half.request, req)
        return None

    @staticmethod
    def _keep_scores(asked: GenerationRequest, req: PrefillRequest) -> None:
        """The log probabilities of the prompt that the client here asks for stay here: the decode node asks for its
        own. If both do, they get the same.
        """
        if asked.sampling.prompt_logprobs is None:
            return
        req.scores_kept = bytearray()
        if (sampling := req.request.sampling).prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=asked.sampling.prompt_logprobs)
            req.request = replace(req.request, sampling=sampling)

    def moved(self, req: PrefillRequest) -> None:
        """After every event of a room: reports its end to the client here, if it has one."""
        half = self._joined.get(req.key)
        if half is None:
            return
        try:
            self._answer(half, req)
        except Exception as error:
            log.exception("the client of %s could not be answered", req.key)
            self._end(half, internal_error("prefill", error))

    def _answer(self, half: _HttpHalf, req: PrefillRequest) -> None:
        room = req.room
        if room.phase is PrefillPhase.COMMITTED and req.first is not None:
            output = _first_output(self._tokenizer, half.request, req.first)
            self._let_go(half)
            half.generation.set_route(RouteInfo(self.address, half.room, cached_tokens=room.n_reused))
            n_top = req.request.sampling.prompt_logprobs
            if req.scores_kept is not None and n_top is not None:
                half.generation.prompt_logprobs = PromptLogprobs(n_top, req.scores_kept)
            half.generation.put(output)
        elif room.failure is not None and not room.active:
            self._end(half, room.failure)

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = self._clock()
        for half in list(self._http.values()):
            waited_s = now - half.alive
            if half.req is None and waited_s > self._pair_s:
                what = "no decode node reserved" if half.other is None else "the decode node is silent about"
                self._end(half, self._late(f"{what} room {half.room}", waited_s))
        for room, other in list(self._decode.items()):
            if now - other.since > self._pair_s:
                failure = self._late(f"no request for room {room} came over HTTP", now - other.since)
                self._end_decode(other, failure)
                self.refuse(other.peer, other.waiting, failure)
        self._ended = {room: ended for room, ended in self._ended.items() if now < ended.until}

    def _late(self, what: str, waited_s: float) -> Failure:
        reason = f"phase pair on the prefill node: {what} for {waited_s:.1f} s (deadline {self._pair_s:g} s)"
        return Failure("deadline", reason)

    def fail_all(self, failure: Failure) -> None:
        """Ends every half that has not met its other half, and those that wait for memory on their decode node."""
        for half in [half for half in self._http.values() if half.req is None]:
            self._end(half, failure)
        for other in self._decode.values():
            self.refuse(other.peer, other.waiting, failure)
        self._decode.clear()

    def _remember(self, room: int, side: Side, failure: Failure) -> None:
        self._ended[room] = _Ended(side, failure, self._clock() + min(REMEMBER_S, self._pair_s))
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _earlier_end(self, room: int, side: Side) -> tuple[Failure | None, bool]:
        """What a half that comes on ``side`` must end with, and whether an end with this room's id is remembered."""
        ended = self._ended.get(room)
        if ended is None or self._clock() >= ended.until:
            return None, False
        concerns_it = not ended.is_used and ended.side is not side
        ended.is_used = True
        return (ended.failure if concerns_it else None), True


def _not_yours(room: int) -> Failure:
    return Failure("duplicate_room", f"room {room} is another decode node's, or another attempt's")


def _for_client(failure: Failure) -> RequestFailed:
    """A room's failure as the error of the client here."""
    if failure.code == "aborted":
        failure = Failure("decode_gave_up", f"the decode node gave the room up: {failure.reason}")
    return RequestFailed(failure)


def _first_output(tokenizer: TokenizerLike, request: GenerationRequest, first: TokenLogprob) -> TokenOutput:
    """The whole answer of a prefill node: the first token, as if it had been asked for one; none if none was wanted."""
    if not request.sampling.max_tokens:
        return TokenOutput((), "", finish_reason=FinishReason.LENGTH)
    processor = OutputProcessor(tokenizer, replace(request.sampling, max_tokens=1), request.prompt_ids)
    output = processor.feed((first.token_id,), (first,)) or TokenOutput((first.token_id,), "")
    return msgspec.structs.replace(output, finish_reason=FinishReason.LENGTH, stop_reason=None)
