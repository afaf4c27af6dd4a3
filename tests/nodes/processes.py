"""Nodes in processes of their own, to be killed and frozen: :mod:`.prefill_process` and :mod:`.decode_process`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class PrefillProcess:
    """A prefill node of its own; ``chunk_delay_s`` is what each chunk takes at least."""

    def __init__(self, port: int = 0, chunk_delay_s: float = 0.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nodes.prefill_process", str(port), str(chunk_delay_s)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with self.process:  # closes its pipes
            self.process.kill()


class DecodeProcess:
    """See :mod:`tests.nodes.decode_process`. ``ports`` are Mooncake's, from and to."""

    def __init__(self, address: str, ports: tuple[int, int] | None = None) -> None:
        more = {"MC_MIN_RPC_PORT": str(ports[0]), "MC_MAX_RPC_PORT": str(ports[1])} if ports else {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nodes.decode_process", address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
        )

    def say(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    async def hear(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def ask(self, n: int, seed: int = 0) -> str:
        self.say(f"ask {n} {seed}")
        return await self.hear()

    def end(self) -> None:
        with self.process:  # closes its pipes
            self.process.kill()
