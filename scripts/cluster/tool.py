"""What the command lines of the tools have in common."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.node import ROOT, ClusterFailed
from cluster.signals import StopRequested, StopSignals

FAILURES = ROOT / "docs" / "failures.md"


def exit_code(name: str, work: Callable[[], int], *failures: type[Exception], logs: Path | None = None) -> int:
    """The exit code of ``work``; 2 if the servers could not be run (or for ``failures``), 130 after a stop signal."""
    reported: tuple[type[Exception], ...] = (ClusterFailed, *failures)
    try:
        with StopSignals():
            return work()
    except reported as error:
        print(f"{name}: {error}" + (f"; logs in {logs}" if logs else ""), file=sys.stderr)
        return 2
    except StopRequested:
        return 130


def log_folder(given: Path | None, name: str) -> Path:
    """The folder that was given for logs, or a new one."""
    logs = given or Path(tempfile.mkdtemp(prefix=f"{name}-"))
    logs.mkdir(parents=True, exist_ok=True)
    return logs


@dataclass(frozen=True)
class Section:
    """What stands between two markers of docs/failures.md, made by a tool."""

    name: str

    def read(self) -> str:
        return self._parts()[1].strip()

    def write(self, content: str) -> None:
        head, _, tail = self._parts()
        FAILURES.write_text(f"{head}\n\n{content}\n\n{tail}", encoding="utf-8")

    def _parts(self) -> tuple[str, str, str]:
        begin, end = f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"
        head, _, rest = FAILURES.read_text(encoding="utf-8").partition(begin)
        content, _, tail = rest.partition(end)
        return head + begin, content, end + tail
