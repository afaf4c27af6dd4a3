"""Waiting for something that another process does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import httpx

POLL_S = 0.05


def until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Waits for ``condition`` to be true; the seconds it took. A node that cannot be reached counts as not yet.

    Raises :class:`TimeoutError`, which names ``what``.
    """
    started = time.monotonic()
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return time.monotonic() - started
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


async def nothing_left(look: Callable[[], Sequence[str]], timeout_s: float) -> tuple[Sequence[str], float]:
    """Calls ``look`` in a thread again and again until it finds nothing; its last result, and the seconds it took."""
    started = time.monotonic()
    while True:
        try:
            left = await asyncio.to_thread(look)
        except httpx.TransportError as error:
            left = [f"not reachable: {error!r}"]
        if not left or time.monotonic() - started > timeout_s:
            return left, time.monotonic() - started
        await asyncio.sleep(POLL_S)


async def until_async(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """As :func:`until`, with ``condition`` in a thread."""
    left, seconds = await nothing_left(lambda: [] if condition() else [what], timeout_s)
    if left:
        raise TimeoutError(f"not within {timeout_s:g} s: {'; '.join(left)}")
    return seconds
