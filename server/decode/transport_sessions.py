"""One transport endpoint for each prefill node, so that one peer's writes can be cut off alone: the fence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable

from server.cache.arena import Arena
from server.threads import Threads
from server.transfer.engines.base import RegistrationFailed, TransferEngine, TransferError, open_registered

log = logging.getLogger(__name__)

SETTLE_S = 0.05
"""Between unregistering and closing: writes that the transport had accepted may end in peace.

Closing is what makes it safe.
"""

_TRIES = 4
"""Endpoints that are open at the same time, to find a session that was not used before."""
_MAX_AT_ONCE = 16
"""Peers whose endpoints may be opened or closed at the same time; a transport may take seconds for one."""


class TransportSessions:
    """The endpoints, by peer address. The arena is registered with each of them."""

    def __init__(self, make_engine: Callable[[], TransferEngine], arena: Arena) -> None:
        self._make_engine = make_engine
        self._arena = arena
        self.engines: dict[str, TransferEngine] = {}
        self._used: dict[str, int] = {}
        self._order = itertools.count()
        self._threads = Threads("fence", _MAX_AT_ONCE)

    async def open(self, address: str) -> TransferEngine:
        """A fresh endpoint for the peer at ``address``. Raises what the transport raises; closes an older one first.

        Its session is another than every one before, for any peer: a peer may be frozen for as long as it likes, and
        then go on writing to a session that was closed meanwhile.
        """
        await self.fence(address)
        engine = await self._open_another()
        self.engines[address], self._used[engine.session] = engine, next(self._order)
        return engine

    async def _open_another(self) -> TransferEngine:
        """Where there is no session that was not used before (few ports), that which was used the longest ago."""
        opened: list[TransferEngine] = []
        try:
            while len(opened) < _TRIES:
                opened.append(await self._threads.run(self._open))
                if opened[-1].session not in self._used:
                    break
        except TransferError:
            if not opened:
                raise
        chosen = min(opened, key=lambda engine: self._used.get(engine.session, -1))
        for engine in opened:
            if engine is not chosen:
                await self._threads.run(engine.close)
        return chosen

    async def fence(self, address: str) -> None:
        """Refuses new writes, then closes the endpoint. When this returns, no write of that peer can land.

        Raises what the transport's ``close`` raises; then nothing is known and the memory must stay quarantined.
        """
        engine = self.engines.get(address)
        if engine is None:
            return
        with contextlib.suppress(RegistrationFailed):
            await self._threads.run(engine.unregister, self._arena.ptr)
        await asyncio.sleep(SETTLE_S)
        await self._threads.run(engine.close)
        del self.engines[address]
        log.info("fenced the transport session of prefill %s", address)

    async def close(self) -> None:
        """Fences every peer. One that cannot be fenced is logged, and ends with the process."""
        for address in list(self.engines):
            try:
                await self.fence(address)
            except TransferError:
                log.exception("the transport session of prefill %s could not be closed", address)
        self._threads.close()

    def _open(self) -> TransferEngine:
        return open_registered(self._make_engine, self._arena.ptr, self._arena.nbytes)
