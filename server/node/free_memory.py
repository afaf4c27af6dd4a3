"""How much memory is free for this process, on the machine and in its control groups; and ``--memory``, part of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.cache.specs import LayoutError
from server.sizes import nbytes_of


@dataclass(frozen=True)
class FreeMemory:
    """``nbytes`` that this process may still take, and what sets that limit."""

    nbytes: int
    limit: str


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """The least of what the machine and every control group above this process leave. ``root`` is of the file system.

    Raises :class:`OSError` where the system does not say (no Linux).
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    machine = FreeMemory(int(fields["MemAvailable"].split()[0]) << 10, "of this machine")
    return min([machine, *_of_control_groups(root)], key=lambda free: free.nbytes)


def _of_control_groups(root: Path) -> Iterator[FreeMemory]:
    """Version 2 (``0::/path``) and version 1 (``N:memory:/path``). Inside a container the path may be one of outside:
    then the group's own folder is the top one.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and (free := _of_group(folder, *names)) is not None:
                yield FreeMemory(max(0, free), f"by the limit of the control group {folder.relative_to(root)}")


def _of_group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Bytes below the limit of one group; None where it has none. Files in the page cache give way."""
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage_name).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(limit) - used + int(counts.get(cache_name, 0))


@dataclass(frozen=True)
class MemoryLimit:
    """What ``--memory`` says, as ``text``: ``nbytes``, or a ``fraction`` of what is free."""

    text: str
    nbytes: int = 0
    fraction: float | None = None

    def of(self, free: FreeMemory | None) -> int:
        """In bytes. Raises :class:`LayoutError` for a fraction of what is not known."""
        if self.fraction is None:
            return self.nbytes
        if free is None:
            raise LayoutError(f"--memory {self.text}: this system does not say how much is free; give bytes, as 12GiB")
        return int(self.fraction * free.nbytes)


def memory_limit(text: str) -> MemoryLimit:
    """``0.8`` (of what is free) or ``12GiB``, as an option's type."""
    try:
        number = float(text)
    except ValueError:
        number = 2.0
    if 0 < number <= 1:
        return MemoryLimit(text, fraction=number)
    try:
        nbytes = nbytes_of(text)
    except ValueError:
        nbytes = 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a part of what is free, such as 0.8, nor bytes: 12GiB")
    return MemoryLimit(text, nbytes)
