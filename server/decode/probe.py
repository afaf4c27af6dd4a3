"""Readiness that means something: a small write by a prefill node really lands in this node's memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from server.cache.arena import Arena
from server.cache.layout import PROBE_NBYTES, Run
from server.decode.prefill_link import PrefillLink
from server.failure import Failure
from server.transfer.protocol import PROBE_BLOCK_NBYTES, Probe, ProbeDone, Registration, registration_of
from server.transfer.rooms import Deadlines


@dataclass(frozen=True)
class _Result:
    """How the last probe of one registration ended: ``error`` None if the write landed."""

    at: float
    registration: Registration
    error: str | None


@dataclass(frozen=True)
class _Waiting:
    """A probe under way."""

    link: PrefillLink
    probe: Probe
    answer: asyncio.Future[ProbeDone]


class Prober:
    """Asks peers for probe writes.

    Every write has a lane of the probe region to itself while it is under way; a result is good for ``fresh_s``.
    """

    def __init__(self, arena: Arena, deadlines: Deadlines, clock: Callable[[], float], fresh_s: float = 2.0) -> None:
        self.fresh_s = fresh_s
        self._arena = arena
        self._deadlines, self._clock = deadlines, clock
        self._nonces = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._last: dict[str, _Result] = {}
        self._lock = asyncio.Lock()
        self._lanes: asyncio.Queue[int] = asyncio.Queue()
        for lane in range(PROBE_NBYTES // PROBE_BLOCK_NBYTES):
            self._lanes.put_nowait(lane)

    @property
    def n_waiting(self) -> int:
        """Probes under way."""
        return len(self._waiting)

    async def ready(self, links: Sequence[PrefillLink]) -> tuple[bool, str]:
        """Whether every registered one of ``links`` passes, and there is one; why not, or over which transport.

        Concurrent calls share one probe.
        """
        async with self._lock:
            registered = [link for link in links if link.registered]
            if not registered:
                return False, "; ".join(link.reason for link in links)
            errors = await asyncio.gather(*(self._fresh(link) for link in registered))
            words = [
                f"prefill {link.address}: {error or f'probe transfer ok over {link.transport}'}"
                for link, error in zip(registered, errors, strict=True)
            ]
            return not any(errors), "; ".join(words)

    async def _fresh(self, link: PrefillLink) -> str | None:
        """A result of this registration that is not too old: None if the write landed, else what went wrong."""
        registration = link.registration
        if registration is None:
            return "not registered"
        last = self._last.get(link.address)
        if last is not None and last.registration == registration and self._clock() - last.at < self.fresh_s:
            return last.error
        lane = await self._lanes.get()
        try:
            offset = lane * PROBE_BLOCK_NBYTES
            probe = Probe(*registration, next(self._nonces), offset)
            error = await self._probe(link, probe)
        finally:
            self._lanes.put_nowait(lane)
        self._last[link.address] = _Result(self._clock(), registration, error)
        return error

    def on_done(self, message: ProbeDone) -> None:
        waiting = self._waiting.get(message.nonce)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(message)

    def on_lost(self, link: PrefillLink, failure: Failure) -> None:
        """Nobody will answer any more."""
        for waiting in self._waiting.values():
            if waiting.link is link:
                probe = waiting.probe
                self.on_done(ProbeDone(*registration_of(probe), probe.nonce, 0, failure.reason))

    async def _probe(self, link: PrefillLink, probe: Probe) -> str | None:
        """Asks, and again while there is no answer: one of the two messages may be lost."""
        answer: asyncio.Future[ProbeDone] = asyncio.get_running_loop().create_future()
        self._waiting[probe.nonce] = _Waiting(link, probe, answer)
        again_s, deadline_s = self._deadlines.resend_s, self._deadlines.probe_s
        try:
            async with asyncio.timeout(deadline_s):
                while not answer.done():
                    link.send(probe)
                    await asyncio.wait({answer}, timeout=again_s)
                    again_s = min(2 * again_s, self._deadlines.resend_cap_s)
            done = answer.result()
        except TimeoutError:
            return f"no answer to a probe transfer within {deadline_s:g} s"
        finally:
            del self._waiting[probe.nonce]
        if done.reason:
            return f"probe transfer failed: {done.reason}"
        landed = xxhash.xxh3_64(self._arena.read([Run(probe.offset, PROBE_BLOCK_NBYTES)])).intdigest()
        return None if landed == done.digest else "probe transfer was reported done, but its bytes are not here"
