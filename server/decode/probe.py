"""Readiness that means something: a small write by a prefill node really lands in this node's memory."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import xxhash

from server.cache.arena import Arena
from server.cache.layout import PROBE_NBYTES, Run
from server.transfer.peer import PeerLink
from server.transfer.protocol import PROBE_BLOCK_NBYTES, Probe, ProbeDone

_LANES = PROBE_NBYTES // PROBE_BLOCK_NBYTES


class Prober:
    """Asks peers for probe writes.

    Every peer writes into a lane of the probe region; a result is good for ``fresh_s``.
    """

    def __init__(self, arena: Arena, deadline_s: float, fresh_s: float = 2.0) -> None:
        self._arena = arena
        self._deadline_s, self._fresh_s = deadline_s, fresh_s
        self._nonces = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ProbeDone]] = {}
        self._last: tuple[float, bool, str] = (float("-inf"), False, "")
        self._lock = asyncio.Lock()

    async def ready(self, links: Callable[[], list[PeerLink]]) -> tuple[bool, str]:
        """Whether at least one of ``links()`` passes, and why not or through whom. Concurrent calls share one probe."""
        async with self._lock:
            registered = [link for link in links() if link.registered]
            if not registered:
                return False, "; ".join(link.reason for link in links())
            if time.monotonic() - self._last[0] < self._fresh_s:
                return self._last[1:]
            results = await asyncio.gather(*(self._probe(lane % _LANES, link) for lane, link in enumerate(registered)))
            passed = any(error is None for error in results)
            reasons = "; ".join(
                f"prefill {link.address}: {error or 'probe transfer ok'}"
                for link, error in zip(registered, results, strict=True)
            )
            self._last = (time.monotonic(), passed, reasons)
            return passed, reasons

    def on_done(self, message: ProbeDone) -> None:
        waiting = self._waiting.get(message.nonce)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _probe(self, lane: int, link: PeerLink) -> str | None:
        """None if the write landed, else what went wrong."""
        if link.ours is None or link.theirs is None:
            return "not registered"
        nonce, offset = next(self._nonces), lane * PROBE_BLOCK_NBYTES
        self._waiting[nonce] = asyncio.get_running_loop().create_future()
        try:
            link.send(Probe(link.theirs.incarnation, link.ours.incarnation, nonce, offset))
            done = await asyncio.wait_for(self._waiting[nonce], self._deadline_s)
        except TimeoutError:
            return f"no answer to a probe transfer within {self._deadline_s:g} s"
        finally:
            del self._waiting[nonce]
        if done.reason:
            return f"probe transfer failed: {done.reason}"
        landed = xxhash.xxh3_64(self._arena.read([Run(offset, PROBE_BLOCK_NBYTES)])).intdigest()
        return None if landed == done.digest else "probe transfer was reported done, but its bytes are not here"
