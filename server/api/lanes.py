"""Lanes for work whose cost follows a request's size: one job at a time, the smallest waiting one first, or those of
clients that have had least.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeVar

from server.failure import Failure, RequestFailed
from server.memory import give_back_soon
from server.threads import Threads

T = TypeVar("T")

FORGOTTEN = 0.1
"""Seconds of work for a client that are forgotten with each second."""
_LARGE = 1 << 18
"""Size of a job whose memory is worth a search, once it is over."""


@dataclass(frozen=True)
class LaneLimits:
    """How many jobs may wait, and for how long; and how long one may run. In seconds."""

    max_waiting: int
    wait_s: float = 30.0
    run_s: float = 30.0


@dataclass(frozen=True, eq=False)
class _Job:
    """One that waits for its ``turn``."""

    size: int
    age: int
    client: str | None
    turn: asyncio.Future[None]


class Lane:
    """A thread of its own with a bounded queue in front of it. A caller that is cancelled takes its job out of it.

    Where a job's size says little of its cost, it comes with its ``client``: first are those of clients for whom the
    lane has worked least of late, of equal ones the smallest.

    A job in the thread cannot be ended, so only jobs of a bounded size may come here, or those whose ``give_up`` ends
    them by other means. The next one begins when the thread is free, whether somebody still waits for the job or not.
    """

    def __init__(self, name: str, limits: LaneLimits) -> None:
        self.name = name
        self._limits = limits
        self._threads = Threads(name, 1)
        self._waiting: list[_Job] = []
        self._spent: dict[str, tuple[float, float]] = {}
        """For each client the seconds of work that were not forgotten at that time, of the event loop's clock."""
        self._running: tuple[str | None, float] = None, 0.0
        """The client of the job in the thread, and since when it runs."""
        self._ages = itertools.count()
        self._is_taken = False

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def run(
        self,
        size: int,
        function: Callable[[], T],
        give_up: Callable[[], None] | None = None,
        *,
        client: str | None = None,
    ) -> T:
        """The result of ``function``, called in the lane's thread when its turn comes. Jobs of less ``size`` go first.

        ``give_up`` is called when nobody waits for a call that may have begun: the caller was cancelled, or it ran for
        too long.

        Raises :class:`RequestFailed`: 503 ``overloaded`` if too many jobs wait that go first, or the turn does not come
        in time; 504 ``deadline`` for a call that does not end in time; and what the call raises.
        """
        if self._is_taken:
            await self._wait(size, client)
        self._is_taken = True
        self._running = client, _now()
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
        self._charge()
        if not call.cancelled():
            call.exception()  # looked at, also where nobody waits for it
        self._pass_on()
        if size >= _LARGE:
            give_back_soon()

    async def _wait(self, size: int, client: str | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        job = _Job(size, next(self._ages), client, turn)
        if len(self._waiting) >= self._limits.max_waiting:
            self._make_room(job)
        self._waiting.append(job)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await turn
        except BaseException as error:
            if job in self._waiting:
                self._waiting.remove(job)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # the turn came at the same moment
            if isinstance(error, TimeoutError):
                reason = f"phase {self.name}: no turn within {self._limits.wait_s:g} s, other requests went first"
                raise RequestFailed(Failure("overloaded", reason)) from error
            raise

    def _make_room(self, job: _Job) -> None:
        """Takes a job of a client that has had more out of the full queue.

        :raises RequestFailed: 503 ``overloaded``: there is none.
        """
        reason = f"{len(self._waiting)} requests wait already (phase {self.name}): try again later"
        overloaded = RequestFailed(Failure("overloaded", reason))
        now = _now()
        last = max(self._waiting, key=self._order(now))
        if self._spent_s(last.client, now) <= self._spent_s(job.client, now):
            raise overloaded
        self._waiting.remove(last)
        if not last.turn.done():
            last.turn.set_exception(overloaded)

    def _order(self, now: float) -> Callable[[_Job], tuple[float, int, int]]:
        """By what the jobs that wait are ranked: the smallest goes first."""
        return lambda job: (self._spent_s(job.client, now), job.size, job.age)

    def _spent_s(self, client: str | None, now: float) -> float:
        """What the lane has worked for ``client``, and works now, as far as it is not forgotten."""
        if client is None:
            return 0.0
        running, began = self._running
        spent_s, at = self._spent.get(client, (0.0, now))
        return max(0.0, spent_s - FORGOTTEN * (now - at)) + (now - began if client == running else 0.0)

    def _charge(self) -> None:
        """The running job is over."""
        (client, _), now = self._running, _now()
        if client is not None:
            self._spent[client] = self._spent_s(client, now), now
        self._running = None, 0.0
        self._spent = {name: spent for name, spent in self._spent.items() if self._spent_s(name, now)}

    def _pass_on(self) -> None:
        """The turn goes to the first of the jobs that wait. The lane stays taken for it until it runs."""
        self._is_taken = False
        while self._waiting:
            job = min(self._waiting, key=self._order(_now()))
            self._waiting.remove(job)
            turn = job.turn
            if not turn.done():
                turn.set_result(None)
                self._is_taken = True
                return


def _now() -> float:
    return asyncio.get_running_loop().time()


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
    grammar_texts: Lane = field(default_factory=lambda: _lane("read grammar", 256))
    grammars: Lane = field(default_factory=lambda: _lane("compile grammar", 64))

    def close(self) -> None:
        for each in fields(self):
            getattr(self, each.name).close()
