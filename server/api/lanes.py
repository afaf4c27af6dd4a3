"""Lanes for work whose cost follows a request's size: one job at a time, the smallest waiting one first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from server.failure import Failure, RequestFailed
from server.memory import give_back_soon
from server.threads import Threads

T = TypeVar("T")

_LARGE = 1 << 18
"""Size of a job whose memory is worth a search, once it is over."""


@dataclass(frozen=True)
class LaneLimits:
    """How many jobs may wait, and for how long; and how long one may run. In seconds."""

    max_waiting: int
    wait_s: float = 30.0
    run_s: float = 30.0


class Lane:
    """A thread of its own with a bounded queue in front of it. A caller that is cancelled takes its job out of it.

    A job in the thread cannot be ended, so only jobs of a bounded size may come here, or those whose ``give_up`` ends
    them by other means. The next one begins when the thread is free, whether somebody still waits for the job or not.
    """

    def __init__(self, name: str, limits: LaneLimits) -> None:
        self.name = name
        self._limits = limits
        self._threads = Threads(name, 1)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap, by size and then by age
        self._ages = itertools.count()
        self._is_taken = False

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, size: int, function: Callable[[], T], give_up: Callable[[], None] | None = None) -> T:
        """The result of ``function``, called in the lane's thread when its turn comes. Jobs of less ``size`` go first.

        ``give_up`` is called when nobody waits for a call that may have begun: the caller was cancelled, or it ran for
        too long.

        Raises :class:`RequestFailed`: 503 ``overloaded`` if too many jobs wait, or the turn does not come in time; 504
        ``deadline`` for a call that does not end in time; and what the call raises.
        """
        if self._is_taken:
            await self._wait(size)
        self._is_taken = True
        call = asyncio.ensure_future(self._threads.run(function))
        call.add_done_callback(partial(self._on_done, size))
        try:
            async with asyncio.timeout(self._limits.run_s):
                return await asyncio.shield(call)
        except (TimeoutError, asyncio.CancelledError) as error:
            if give_up is not None:
                give_up()
            if isinstance(error, TimeoutError):
                reason = f"phase {self.name}: not done after {self._limits.run_s:g} s (size {size})"
                raise RequestFailed(Failure("deadline", reason)) from error
            raise

    def close(self) -> None:
        self._threads.close()

    def _on_done(self, size: int, call: asyncio.Future[T]) -> None:
        """The thread is free again, perhaps long after its caller has gone."""
        if not call.cancelled():
            call.exception()  # looked at, also where nobody waits for it
        self._pass_on()
        if size >= _LARGE:
            give_back_soon()

    async def _wait(self, size: int) -> None:
        if len(self._waiting) >= self._limits.max_waiting:
            reason = f"{len(self._waiting)} requests wait already (phase {self.name}): try again later"
            raise RequestFailed(Failure("overloaded", reason))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, next(self._ages), turn)
        heapq.heappush(self._waiting, entry)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await turn
        except BaseException as error:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            elif turn.done() and not turn.cancelled():
                self._pass_on()  # the turn came at the same moment
            if isinstance(error, TimeoutError):
                reason = f"phase {self.name}: no turn within {self._limits.wait_s:g} s, other requests were shorter"
                raise RequestFailed(Failure("overloaded", reason)) from error
            raise

    def _pass_on(self) -> None:
        """The turn goes to the smallest job that waits. The lane stays taken for it until it runs."""
        self._is_taken = False
        while self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                turn.set_result(None)
                self._is_taken = True
                return


def _lane(name: str, max_waiting: int) -> Lane:
    return Lane(name, LaneLimits(max_waiting=max_waiting))


@dataclass(frozen=True)
class Lanes:
    """The lanes of one HTTP app, apart for each kind of work: none of it waits behind another kind."""

    bodies: Lane = field(default_factory=lambda: _lane("read body", 256))
    templates: Lane = field(default_factory=lambda: _lane("chat template", 256))
    texts: Lane = field(default_factory=lambda: _lane("tokenize", 256))
    long_texts: Lane = field(default_factory=lambda: _lane("tokenize long", 32))
    answers: Lane = field(default_factory=lambda: _lane("spell answer", 256))
    grammars: Lane = field(default_factory=lambda: _lane("compile grammar", 64))

    def close(self) -> None:
        for lane in (self.bodies, self.templates, self.texts, self.long_texts, self.answers, self.grammars):
            lane.close()
