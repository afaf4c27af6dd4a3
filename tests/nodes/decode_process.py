"""A decode node with the fake engine and real Mooncake in a process of its own, to be killed and frozen.

``python -m tests.nodes.decode_process ADDRESS`` registers with the prefill node there, prints ``ready SESSION``, and
takes a word and arguments a line from standard input until it ends: ``ask N SEED`` prints ``right``, ``wrong`` or
``failed CODE`` when the request has ended; ``quiet`` waits until all memory is free and prints ``quiet`` if none of it
changes for a while after that, else ``landed``.
"""

from __future__ import annotations

import asyncio
import sys

from server.cache.layout import PROBE_NBYTES
from server.failure import RequestFailed
from server.transfer.engines.mooncake import MooncakeEngine
from tests.nodes.support import NodeUnderTest, Pair, all_free, answer, expected, request
from tests.support.waiting import until

WATCHED_S = 0.7
REGISTERED_S = 150.0
"""Longer than a closed TCP port may stay taken."""


async def serve(address: str) -> None:
    pair = Pair(lambda: MooncakeEngine(transport="tcp"))
    d = await pair.decode(address, wait=False)
    await until(lambda: d.node.server_info()["peers"][0]["state"] == "registered", REGISTERED_S)
    print("ready", pair.transports[-1].session, flush=True)
    asking: set[asyncio.Task[None]] = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *arguments = line.split()
        task = asyncio.create_task(ask(d, *map(int, arguments)) if word == "ask" else watch(d))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await pair.stop(d)


async def ask(d: NodeUnderTest, n: int, seed: int) -> None:
    asked = request(n, seed)
    try:
        is_right = await answer(d.node, asked) == expected(asked) and not d.engine.wrong_bytes
        print("right" if is_right else "wrong", flush=True)
    except RequestFailed as failure:
        print("failed", failure.code, flush=True)


async def watch(d: NodeUnderTest) -> None:
    await until(lambda: all_free(d))
    before = d.arena.buffer[PROBE_NBYTES:].clone()
    await asyncio.sleep(WATCHED_S)
    print("quiet" if d.arena.buffer[PROBE_NBYTES:].equal(before) else "landed", flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
