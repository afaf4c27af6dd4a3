"""A receiver in its own process: maps the file argv[1], registers it with Mooncake, prints "session address", lives on.

With a session as argv[2] it starts engines until one has it.
"""

import contextlib
import mmap
import os
import sys
import time

import numpy as np

from server.transfer.engines.base import TransportMisconfigured
from server.transfer.engines.mooncake import MooncakeEngine


def engine_with(session: str) -> MooncakeEngine:
    port = int(session.rsplit(":", 1)[1])
    os.environ.update(MC_MIN_RPC_PORT=str(port - 1), MC_MAX_RPC_PORT=str(port + 2))
    while True:
        with contextlib.suppress(TransportMisconfigured):  # the few ports were taken
            engine = MooncakeEngine(transport="tcp")
            if engine.session == session:
                return engine
            engine.close()
        time.sleep(0.1)


def main() -> None:
    with open(sys.argv[1], "r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    engine = engine_with(sys.argv[2]) if len(sys.argv) > 2 else MooncakeEngine(transport="tcp")
    engine.register(memory.ctypes.data, memory.nbytes)
    print(engine.session, memory.ctypes.data, flush=True)
    sys.stdin.read()
    os._exit(0)


main()
