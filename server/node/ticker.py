"""The clock of a node: what has to be looked at again and again."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)

TICK_S = 0.1


class Manager(Protocol):
    """What a node keeps its requests or rooms on."""

    def tick(self) -> None: ...


async def tick_for_ever(role: str, manager: Manager) -> None:
    """Ticks every :data:`TICK_S`, until it is cancelled. A tick that raises is logged; the next one comes."""
    while True:
        await asyncio.sleep(TICK_S)
        try:
            manager.tick()
        except Exception:
            log.exception("a tick of the %s node failed", role)
