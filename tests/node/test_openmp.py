"""How long OpenMP's threads spin in a node: said before torch loads its libgomp, which reads it once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
import sys
from types import SimpleNamespace

from server.node.run import run


async def start():
    print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))
    return 0


raise SystemExit(run("test", SimpleNamespace(log_level="error"), start))
"""


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["default", "count", "policy"],
)
def test_threads_that_wait_sleep_soon(chosen: dict[str, str], spins: str) -> None:
    without = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=without | chosen, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["False", spins]
