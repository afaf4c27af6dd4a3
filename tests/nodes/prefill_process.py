"""A prefill node with the fake engine and real Mooncake in a process of its own, to be killed and frozen.

``python -m tests.nodes.prefill_process PORT CHUNK_DELAY_S`` prints its bootstrap port and serves until standard input
ends.
"""

from __future__ import annotations

import asyncio
import sys
import time

from server.transfer.engines.mooncake import MooncakeEngine
from tests.nodes.support import Pair


async def serve(port: int, chunk_delay_s: float) -> None:
    pair = Pair(lambda: MooncakeEngine(transport="tcp"))
    p = await pair.prefill(port=port)
    compute = p.engine.compute

    def slow_compute(command: object) -> None:
        time.sleep(chunk_delay_s)
        compute(command)  # type: ignore[arg-type]

    p.engine.compute = slow_compute  # type: ignore[method-assign]
    print(p.node.bootstrap_port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await pair.stop(p)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
