"""What a node's threads free is the system's again, also what lay at the end of a thread's heap."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
import threading
from types import SimpleNamespace

from server.memory import give_back
from server.node.run import run

MIB = 1 << 20


def resident_mib():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * 4096 / MIB


def work():
    big = bytearray(24 * MIB)  # once such a block is freed, glibc takes smaller ones from the heap
    del big
    blocks = [bytearray(b"x" * MIB) for _ in range(10)]
    del blocks


def in_threads(n):
    barrier = threading.Barrier(n)  # at the same time: each thread may have a heap of its own

    def one():
        barrier.wait()
        work()
        barrier.wait()

    threads = [threading.Thread(target=one) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def start():
    before = resident_mib()
    in_threads(4)
    give_back()
    print(resident_mib() - before)
    return 0


raise SystemExit(run("test", SimpleNamespace(log_level="error"), start))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps heaps for threads")
def test_what_threads_free_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    kept_mib = float(done.stdout.splitlines()[-1])
    assert kept_mib < 8, f"{kept_mib:.0f} MiB of 40 are kept"
