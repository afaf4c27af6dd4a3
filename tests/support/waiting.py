"""Waiting in the loop in which the nodes run. (For nodes in processes of their own: ``cluster.until``.)"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(
    condition: Callable[[], object], timeout_s: float = 30.0, what: str = "", *, poll_s: float = 0.01
) -> float:
    """Waits for a condition; the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(poll_s)
    return time.monotonic() - started
