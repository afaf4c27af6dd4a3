"""Threads for blocking calls, apart for each purpose, so that none waits behind the calls of another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """At most ``n`` threads called ``name``, made when they are needed. May be used again after :meth:`close`."""

    def __init__(self, name: str, n: int) -> None:
        self._name = name
        self._n = n
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call in one of the threads. A caller that is cancelled takes back a call that waits; one that
        runs goes on without it.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._n, thread_name_prefix=self._name)
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Drops calls that wait; those that run come to their end. Returns at once."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


async def call_in_thread(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of one blocking call in a new thread called ``name``."""
    threads = Threads(name, 1)
    try:
        return await threads.run(function, *args, **kwargs)
    finally:
        threads.close()
