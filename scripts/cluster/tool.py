"""What the command lines of the tools have in common."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cluster.node import ClusterFailed
from cluster.signals import StopRequested, StopSignals


def exit_code(name: str, work: Callable[[], int], logs: Path | None = None) -> int:
    """The exit code of ``work``; 2 if the servers could not be run, 130 after a stop signal."""
    try:
        with StopSignals():
            return work()
    except ClusterFailed as error:
        print(f"{name}: {error}" + (f"; logs in {logs}" if logs else ""), file=sys.stderr)
        return 2
    except StopRequested:
        return 130


def log_folder(given: Path | None, name: str) -> Path:
    """The folder that was given for logs, or a new one."""
    logs = given or Path(tempfile.mkdtemp(prefix=f"{name}-"))
    logs.mkdir(parents=True, exist_ok=True)
    return logs
