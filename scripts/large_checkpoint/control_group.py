"""A memory control group of one's own, version 1 or 2, below the one that this process is in."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from cluster.node import ClusterFailed

ROOT = Path("/sys/fs/cgroup")
_REMOVE_S = 5.0


class NoControlGroup(Exception):
    """None can be made here. The message says why."""


class ControlGroup:
    """At most ``limit`` bytes of memory, page cache included, for whatever process joins. Raises
    :class:`NoControlGroup`.
    """

    def __init__(self, name: str, limit: int) -> None:
        parent, self._is_v2 = _own_group()
        self.path = parent / f"{name}-{os.getpid()}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise NoControlGroup(f"{self.path} cannot be made: {error.strerror}") from error
        try:
            (self.path / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")).write_text(str(limit))
        except OSError as error:
            self.remove()
            raise NoControlGroup(f"{self.path} cannot be limited: {error.strerror}") from error

    def joining(self) -> list[str]:
        """A command that joins the group and becomes the command behind it."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs")]

    def peak(self) -> int:
        """The most bytes that its processes had."""
        return int((self.path / ("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes")).read_text())

    def remove(self) -> None:
        """When its processes have ended."""
        end = time.monotonic() + _REMOVE_S
        while True:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            if not self.path.exists():
                return
            if time.monotonic() > end:
                raise ClusterFailed(f"{self.path} cannot be removed: a process is still in it")
            time.sleep(0.1)


def _own_group() -> tuple[Path, bool]:
    """The memory group of this process, and whether it is of version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return ROOT / "memory" / path.lstrip("/"), False
    own = ROOT / Path("/proc/self/cgroup").read_text().partition("::")[2].strip().lstrip("/")
    if "memory" not in _words(own / "cgroup.subtree_control"):
        raise NoControlGroup(f"{own} gives the groups below it no control of memory")
    return own, True


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
