"""Rooms that a router named: one half is a request here over HTTP, the other waits on a decode node; in any order.

When both are there the decode node is told so. It takes memory and sends its ``Reserve``, and with that the room gets
its turn. The client here is answered, with the first token, when the decode node has committed. What ends one half ends
the other at once; half a room ends by the deadline ``pair_s``.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from server.cache.handoff import prompt_hash
from server.engine.generation import NodeGeneration
from server.engine.request import FinishReason, GenerationRequest, RouteInfo, TokenizerLike, TokenLogprob, TokenOutput
from server.engine.stopping import OutputProcessor
from server.failure import Failure, RequestFailed, internal_error
from server.node.request_log import RequestEnd
from server.prefill.request import PrefillRequest
from server.prefill.room import PrefillPhase
from server.prefill.room_events import PrefillEvent
from server.transfer.protocol import Registration, RoutedRequest, Waiting, registration_of
from server.transfer.rooms import GivenUp, RoomKey

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
REMEMBER_S = 2.0
"""How long the end of one half is kept for the other: a router sends both at the same time."""


class Side(enum.StrEnum):
    """Which half of a room."""

    HTTP = "http"
    DECODE = "decode"


@dataclass(eq=False)
class HttpHalf:
    """One request over HTTP, which ``came`` at that time. ``alive`` is then, or when a decode node last said that the
    room waits there: ``waiting``. ``work`` is its room, once there is one. ``is_again``: it came while the end of an
    earlier half of a room with this id was remembered.
    """

    request: GenerationRequest
    room: int
    generation: NodeGeneration
    came: float
    alive: float
    is_again: bool
    waiting: Waiting | None = None
    work: PrefillRequest | None = None

    def end(self, outcome: str, now: float) -> RequestEnd:
        """What is logged of a request that never got a room; a room has a line of its own."""
        waited_s = {"queue": now - self.came}
        n_prompt = len(self.request.prompt_ids)
        return RequestEnd(self.request.request_id, self.room, "decode", "none", n_prompt, 0, waited_s, outcome)


@dataclass(frozen=True)
class _DecodeHalf:
    """A room that has waited on its decode node since ``since``, and whose request has not come here."""

    waiting: Waiting
    since: float
    is_again: bool


@dataclass
class _Ended:
    """The end of the ``side`` half of a room, whose other half had not come. Kept until ``until``.

    It ends one half of the other side, which may be still to come, and is spent then. A half of the same side is not of
    that room any more but of a later one with its id, and so are all that come after it. The ends of those are not
    remembered before ``until``: whoever uses an id again and again fails once by this, not each time.
    """

    side: Side
    failure: Failure
    until: float
    is_spent: bool = False


class RoutedRooms:
    """The halves of rooms that have not met, and the clients here of those that have.

    ``feed`` hands a room an event, ``enqueue`` puts a paired room into the queue. ``invite`` tells the decode node of a
    waiting room that its request is here, ``refuse`` that the room is over. ``address`` is this node's bootstrap
    ``host:port``, for the clients. ``pair_s`` in seconds, by ``clock``.
    """

    def __init__(
        self,
        feed: Callable[[PrefillRequest, PrefillEvent], None],
        enqueue: Callable[[PrefillRequest], None],
        invite: Callable[[Waiting], None],
        refuse: Callable[[Waiting, Failure], None],
        tokenizer: TokenizerLike,
        pair_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = ""
        self._feed = feed
        self._enqueue = enqueue
        self._invite = invite
        self._refuse = refuse
        self._tokenizer = tokenizer
        self._pair_s = pair_s
        self._clock = clock
        self._halves: dict[int, HttpHalf] = {}
        self._lonely: dict[int, _DecodeHalf] = {}
        self._ended: dict[int, _Ended] = {}

    @property
    def n_http(self) -> int:
        """Requests over HTTP that wait for a decode node."""
        return sum(half.work is None for half in self._halves.values())

    @property
    def n_lonely(self) -> int:
        """Rooms that wait on decode nodes for their request over HTTP."""
        return len(self._lonely)

    # --- the client's side --------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> NodeGeneration:
        """Takes a request that came over HTTP, for the room it names.

        Raises :class:`RequestFailed`: 400 without a room, 409 for one that another request has, and whatever the decode
        node's half of the room has failed with.
        """
        if request.routed is None:
            raise RequestFailed(Failure("wrong_role", "this is a prefill node: the request must name a room"))
        room = request.routed.room
        if room in self._halves:
            raise RequestFailed(Failure("duplicate_room", f"room {room} is in use by another request"))
        failure, is_again = self._earlier_end(room, Side.HTTP)
        if failure is not None:
            raise _for_client(failure)
        now = self._clock()
        generation = NodeGeneration(lambda: self._client_gone(half), room=room)
        half = HttpHalf(request, room, generation, now, now, is_again)
        self._halves[room] = half
        other = self._lonely.pop(room, None)
        if other is not None:
            self._meet(half, other.waiting)
        return half.generation

    def turned_away(self, request: GenerationRequest, failure: Failure) -> None:
        """A request that came over HTTP is not taken: the decode node's half of its room is over too."""
        room = request.routed.room if request.routed is not None else None
        if room is None or room in self._halves:
            return
        other = self._lonely.pop(room, None)
        if other is not None:
            self._refuse(other.waiting, failure)
            return
        _, is_again = self._earlier_end(room, Side.HTTP)
        if not is_again:
            self._remember(room, Side.HTTP, failure)

    def _meet(self, half: HttpHalf, waiting: Waiting) -> None:
        half.waiting, half.alive = waiting, self._clock()
        self._invite(waiting)

    def _client_gone(self, half: HttpHalf) -> None:
        self._end(half, Failure("prefill_client_gone", "the client of the prefill node closed its request"))
        half.generation.finish(FinishReason.ABORT)

    def _end(self, half: HttpHalf, failure: Failure) -> None:
        """Ends both halves, or keeps the failure for the one that is still to come."""
        work = half.work
        self._fail(half, failure)
        if work is not None:
            if work.room.active:
                self._feed(work, GivenUp(failure))
        elif half.waiting is not None:
            self._refuse(half.waiting, failure)
        elif not half.is_again:
            self._remember(half.room, Side.HTTP, failure)

    def _fail(self, half: HttpHalf, failure: Failure) -> None:
        if half.work is None:
            half.end(failure.code, self._clock()).log()
        self._let_go(half)
        half.generation.fail(_for_client(failure))

    def _let_go(self, half: HttpHalf) -> None:
        """The request is answered: what its room still does is no business of a later one with the same id."""
        if self._halves.get(half.room) is half:
            del self._halves[half.room]
        if half.work is not None:
            half.work.half = None
            half.work = None

    # --- the decode node's side ---------------------------------------------------------------------------------------

    def heard(self, waiting: Waiting) -> None:
        """The room has no memory on its decode node, which is told how its half here stands, if it has come."""
        half, other = self._halves.get(waiting.room), self._lonely.get(waiting.room)
        known = half.waiting if half is not None else other.waiting if other is not None else None
        if known is not None and known.decode != waiting.decode:
            self._refuse(waiting, _not_yours(waiting.room))
        elif known is not None and known.epoch > waiting.epoch:
            pass  # a late copy: that room is over on its decode node
        elif half is not None:
            if half.work is None:
                self._meet(half, waiting)
        elif other is not None:
            self._lonely[waiting.room] = replace(other, waiting=waiting)
        else:
            self._heard_first(waiting)

    def _heard_first(self, waiting: Waiting) -> None:
        failure, is_again = self._earlier_end(waiting.room, Side.DECODE)
        if failure is not None:
            self._refuse(waiting, failure)
            return
        self._lonely[waiting.room] = _DecodeHalf(waiting, self._clock(), is_again)
        if len(self._lonely) > MAX_REMEMBERED:
            del self._lonely[next(iter(self._lonely))]  # it is heard of again within a second

    def given_up(self, key: RoomKey, failure: Failure) -> None:
        """The decode node gave up a room that waited there."""
        half, other = self._halves.get(key.room), self._lonely.get(key.room)
        if other is not None and _is_of(other.waiting, key):
            self._end_lonely(other, failure)
        elif half is not None and half.work is None and half.waiting is not None and _is_of(half.waiting, key):
            self._fail(half, failure)

    def _end_lonely(self, other: _DecodeHalf, failure: Failure) -> None:
        del self._lonely[other.waiting.room]
        if not other.is_again:
            self._remember(other.waiting.room, Side.DECODE, failure)

    def lost(self, registration: Registration) -> None:
        """A registration is over: what waited in it has to be told anew."""
        for room, other in list(self._lonely.items()):
            if registration_of(other.waiting) == registration:
                del self._lonely[room]
        for half in self._halves.values():
            if half.waiting is not None and registration_of(half.waiting) == registration:
                half.waiting = None

    def reserved(self, work: PrefillRequest) -> None:
        """A ``Reserve`` without a prompt has come, and ``work`` is its room. It may be over already."""
        room = work.room.key.room
        half = self._halves.get(room)
        if half is None:
            gone = Failure("prefill_client_gone", f"the request for room {room} is not on the prefill node any more")
            self._feed(work, GivenUp(gone))
        elif half.work is None and (half.waiting is None or _is_of(half.waiting, work.room.key)):
            self._join(half, work)
        else:
            self._feed(work, GivenUp(_not_yours(room)))

    def _join(self, half: HttpHalf, work: PrefillRequest) -> None:
        """Both halves are here."""
        half.work, work.half = work, half
        if not work.room.active:
            self.moved(work)
            return
        prompt, wanted = half.request.prompt_ids, work.room.reserve.request
        if not isinstance(wanted, RoutedRequest):
            raise TypeError(f"{work.room.key} has its prompt already")
        if len(prompt) != wanted.n_tokens or prompt_hash(prompt) != wanted.prompt_hash:
            reason = (
                f"the prompts of room {half.room} differ: {len(prompt)} tokens with hash {prompt_hash(prompt).hex()} "
                f"here, {wanted.n_tokens} tokens with hash {wanted.prompt_hash.hex()} on the decode node"
            )
            self._feed(work, GivenUp(Failure("prompt_mismatch", reason)))
            return
        work.request = replace(work.request, prompt_ids=prompt)
        self._enqueue(work)

    def moved(self, work: PrefillRequest) -> None:
        """After every event of a room without a prompt of its own: tells the client how it ended."""
        try:
            self._move(work)
        except Exception as error:
            log.exception("the client of %s could not be answered", work.room.key)
            if work.half is not None:
                self._end(work.half, internal_error("prefill", error))

    def _move(self, work: PrefillRequest) -> None:
        room, half = work.room, work.half
        if half is None:
            return
        if room.phase is PrefillPhase.COMMITTED and work.first is not None:
            answer = _first_output(self._tokenizer, half.request, work.first)
            self._let_go(half)
            half.generation.set_route(RouteInfo(self.address, half.room))
            half.generation.put(answer)
        elif room.failure is not None and not room.active:
            self._end(half, room.failure)

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = self._clock()
        for half in list(self._halves.values()):
            waited_s = now - half.alive
            if half.work is None and waited_s > self._pair_s:
                what = "no decode node reserved" if half.waiting is None else "the decode node is silent about"
                self._end(half, self._late(f"{what} room {half.room}", waited_s))
        for room, other in list(self._lonely.items()):
            if now - other.since > self._pair_s:
                failure = self._late(f"no request for room {room} came over HTTP", now - other.since)
                self._end_lonely(other, failure)
                self._refuse(other.waiting, failure)
        self._ended = {room: ended for room, ended in self._ended.items() if now < ended.until}

    def _late(self, what: str, waited_s: float) -> Failure:
        reason = f"phase pair on the prefill node: {what} for {waited_s:.1f} s (deadline {self._pair_s:g} s)"
        return Failure("deadline", reason)

    def fail_all(self, failure: Failure) -> None:
        """Ends every half that has not met its other half, and those that wait for memory on their decode node."""
        for half in [half for half in self._halves.values() if half.work is None]:
            self._end(half, failure)
        for other in self._lonely.values():
            self._refuse(other.waiting, failure)
        self._lonely.clear()

    def _remember(self, room: int, side: Side, failure: Failure) -> None:
        self._ended[room] = _Ended(side, failure, self._clock() + min(REMEMBER_S, self._pair_s))
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _earlier_end(self, room: int, side: Side) -> tuple[Failure | None, bool]:
        """What a half that comes on ``side`` must end with, and whether an end with this room's id is remembered."""
        ended = self._ended.get(room)
        if ended is None or self._clock() >= ended.until:
            return None, False
        concerns_it = not ended.is_spent and ended.side is not side
        ended.is_spent = True
        return (ended.failure if concerns_it else None), True


def _is_of(waiting: Waiting, key: RoomKey) -> bool:
    return (waiting.room, waiting.epoch, waiting.decode) == (key.room, key.epoch, key.decode)


def _not_yours(room: int) -> Failure:
    return Failure("duplicate_room", f"room {room} is another decode node's, or another attempt's")


def _for_client(failure: Failure) -> RequestFailed:
    """A room's failure as the error of the client here."""
    if failure.code == "aborted":
        failure = Failure("decode_gave_up", f"the decode node gave the room up: {failure.reason}")
    return RequestFailed(failure)


def _first_output(tokenizer: TokenizerLike, request: GenerationRequest, first: TokenLogprob) -> TokenOutput:
    """The whole answer of a prefill node: the first token, as if it had been asked for one."""
    processor = OutputProcessor(tokenizer, replace(request.sampling, max_tokens=1), request.prompt_ids)
    output = processor.feed((first.token_id,), (first,)) or TokenOutput((first.token_id,), "")
    return replace(output, finish_reason=FinishReason.LENGTH, stop_reason=None)
