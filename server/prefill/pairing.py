"""Rooms that a router named: the request comes here over HTTP, the ``Reserve`` from a decode node, in any order.

A room gets its turn only when both are there, and the client here is answered, with the first token, when the decode
node has committed. What ends one half ends the other at once; half a room ends by the deadline ``pair_s``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from server.cache.handoff import prompt_hash
from server.engine.generation import NodeGeneration
from server.engine.request import (
    FinishReason,
    GenerationRequest,
    RequestFailed,
    RouteInfo,
    TokenizerLike,
    TokenLogprob,
    TokenOutput,
)
from server.engine.stopping import OutputProcessor
from server.node.request_log import RequestEnd
from server.prefill.work import RoomWork
from server.transfer.prefill_events import Paired, PrefillEvent
from server.transfer.prefill_room import PrefillPhase
from server.transfer.protocol import RoutedRequest, Waiting
from server.transfer.rooms import Failure, GivenUp, RoomKey

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
REMEMBER_S = 2.0
"""How long the end of one half is kept for the other: a router sends both at the same time."""


@dataclass(eq=False)
class HttpHalf:
    """One request over HTTP, which ``came`` at that time. ``alive`` is then, or when a decode node last said that the
    room waits there for memory: ``waiting``. ``work`` is its room, once there is one.
    """

    request: GenerationRequest
    room: int
    generation: NodeGeneration
    came: float
    alive: float
    waiting: Waiting | None = None
    work: RoomWork | None = None

    def end(self, outcome: str, now: float) -> RequestEnd:
        """What is logged of a request that never got a room; a room has a line of its own."""
        waited_s = {"queue": now - self.came}
        n_prompt = len(self.request.prompt_ids)
        return RequestEnd(self.request.request_id, self.room, "decode", "none", n_prompt, 0, waited_s, outcome)


@dataclass(frozen=True)
class _Ended:
    """The end of a half whose other half had not come, kept until ``until``."""

    failure: Failure
    until: float


class Pairing:
    """The halves that came over HTTP, and their rooms.

    ``feed`` hands a room an event, ``enqueue`` puts a paired room into the queue, ``tell`` answers a decode node whose
    room is over before it was reserved. ``address`` is this node's bootstrap ``host:port``, for the clients. ``pair_s``
    in seconds, by ``clock``.
    """

    def __init__(
        self,
        feed: Callable[[RoomWork, PrefillEvent], None],
        enqueue: Callable[[RoomWork], None],
        tell: Callable[[Waiting, Failure], None],
        tokenizer: TokenizerLike,
        pair_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = ""
        self._feed = feed
        self._enqueue = enqueue
        self._tell = tell
        self._tokenizer = tokenizer
        self._pair_s = pair_s
        self._clock = clock
        self._halves: dict[int, HttpHalf] = {}
        self._lonely: dict[int, RoomWork] = {}
        self._ended: dict[int, _Ended] = {}

    @property
    def n_http(self) -> int:
        """Requests over HTTP that wait for a decode node."""
        return sum(half.work is None for half in self._halves.values())

    @property
    def rooms(self) -> list[RoomWork]:
        """Rooms that wait for their request over HTTP."""
        return list(self._lonely.values())

    # --- the client's side --------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> NodeGeneration:
        """Takes a request that came over HTTP, for the room it names.

        Raises :class:`RequestFailed`: 400 without a room, 409 for one that another request has, and whatever the decode
        node's half of the room has failed with.
        """
        if request.named is None:
            raise RequestFailed("wrong_role", "this is a prefill node: the request must name a room", status=400)
        room = request.named.room
        if room in self._halves:
            raise RequestFailed("duplicate_room", f"room {room} is in use by another request", status=409)
        ended = self._ended.pop(room, None)
        if ended is not None:
            raise _request_failed(ended.failure)
        now = self._clock()
        half = HttpHalf(request, room, NodeGeneration(lambda: self._client_gone(half), room=room), now, now)
        self._halves[room] = half
        work = self._lonely.pop(room, None)
        if work is not None:
            self._join(half, work)
        return half.generation

    def _client_gone(self, half: HttpHalf) -> None:
        self._end(half, Failure("prefill_client_gone", "the client of the prefill node closed its request", 502))
        half.generation.finish(FinishReason.ABORT)

    def _end(self, half: HttpHalf, failure: Failure) -> None:
        """Ends both halves, or keeps the failure for the one that is still to come."""
        self._halves.pop(half.room, None)
        if half.work is None:
            half.end(failure.code, self._clock()).log()
            self._remember(half.room, failure)
            if half.waiting is not None:
                self._tell(half.waiting, failure)
        elif half.work.room.active:
            self._feed(half.work, GivenUp(failure))
        half.generation.fail(_request_failed(failure))

    # --- the decode node's side ---------------------------------------------------------------------------------------

    def heard(self, waiting: Waiting) -> None:
        """The room waits for memory on its decode node, which is told if its half here is over."""
        half = self._halves.get(waiting.room)
        if half is not None and half.work is None:
            half.waiting, half.alive = waiting, self._clock()
        elif half is None and (ended := self._ended.get(waiting.room)) is not None:
            self._tell(waiting, ended.failure)

    def given_up(self, key: RoomKey, failure: Failure) -> None:
        """The decode node gave up a room that waited there for memory."""
        half = self._halves.get(key.room)
        if half is None or half.work is not None or half.waiting is None:
            return
        if (half.waiting.epoch, half.waiting.decode) == (key.epoch, key.decode):
            half.waiting = None
            self._end(half, failure)

    def reserved(self, work: RoomWork) -> None:
        """A ``Reserve`` without a prompt has come, and ``work`` is its room. It may be over already."""
        room = work.room.key.room
        half = self._halves.get(room)
        if half is not None and half.work is None:
            self._join(half, work)
        elif half is not None or room in self._lonely:
            self._feed(work, GivenUp(Failure("duplicate_room", f"room {room} is another decode node's", 409)))
        elif (ended := self._ended.pop(room, None)) is not None:
            self._feed(work, GivenUp(ended.failure))
        elif work.room.active:
            self._lonely[room] = work
        elif work.room.failure is not None:
            self._remember(room, work.room.failure)

    def _join(self, half: HttpHalf, work: RoomWork) -> None:
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
            self._feed(work, GivenUp(Failure("prompt_mismatch", reason, 400)))
            return
        work.request = replace(work.request, prompt_ids=prompt)
        self._feed(work, Paired())
        self._enqueue(work)

    def moved(self, work: RoomWork) -> None:
        """After every event of a room without a prompt of its own: tells the client how it ended."""
        try:
            self._move(work)
        except Exception as error:
            log.exception("the client of %s could not be answered", work.room.key)
            if work.half is not None:
                self._end(work.half, Failure("internal_error", f"the prefill node failed: {error!r}", 500))

    def _move(self, work: RoomWork) -> None:
        room, half = work.room, work.half
        if room.phase is PrefillPhase.PAIR or not (half or self._lonely.get(room.key.room) is work):
            return
        if half is None:
            del self._lonely[room.key.room]
            self._remember(room.key.room, room.failure or Failure("room_over", f"{room.key} is over", 409))
        elif room.phase is PrefillPhase.COMMITTED and work.first is not None:
            answer = _first_output(self._tokenizer, half.request, work.first)
            self._halves.pop(half.room, None)
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
                reason = f"phase pair on the prefill node: {what} room {half.room} for {waited_s:.1f} s "
                reason += f"(deadline {self._pair_s:g} s)"
                self._end(half, Failure("deadline", reason, 504))
        for room in [room for room, ended in self._ended.items() if ended.until < now]:
            del self._ended[room]

    def fail_all(self, failure: Failure) -> None:
        """Ends every request that still waits for its decode node."""
        for half in [half for half in self._halves.values() if half.work is None]:
            self._end(half, failure)

    def _remember(self, room: int, failure: Failure) -> None:
        self._ended.pop(room, None)
        self._ended[room] = _Ended(failure, self._clock() + min(REMEMBER_S, self._pair_s))
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]


def _request_failed(failure: Failure) -> RequestFailed:
    """A room's failure as the error of the client here."""
    if failure.code == "aborted":
        return RequestFailed("decode_gave_up", f"the decode node gave the room up: {failure.reason}", status=502)
    return RequestFailed(failure.code, failure.reason, status=failure.status, component=failure.component or None)


def _first_output(tokenizer: TokenizerLike, request: GenerationRequest, first: TokenLogprob) -> TokenOutput:
    """The whole answer of a prefill node: the first token, as if it had been asked for one."""
    processor = OutputProcessor(tokenizer, replace(request.sampling, max_tokens=1), request.prompt_ids)
    output = processor.feed((first.token_id,), (first,)) or TokenOutput((first.token_id,), "")
    return replace(output, finish_reason=FinishReason.LENGTH, stop_reason=None)
