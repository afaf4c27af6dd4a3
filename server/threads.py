"""Threads: for blocking calls, apart for each purpose, so that none waits behind the calls of another; and those of the
compute libraries.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SPINS = "1000"
"""Some fifty microseconds: longer than most pauses between the parallel loops of one step. libgomp itself spins so long
where threads outnumber cores, and else three hundred times as long.
"""


def limit_spinning() -> None:
    """Lets OpenMP's threads sleep soon where they wait for one that has lost its core to somebody else. To be called
    before torch is imported: its libgomp, which the kernels use too, reads the environment when it is loaded.

    What the environment says of it already stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


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
