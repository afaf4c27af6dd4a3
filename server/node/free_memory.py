"""How much memory is free for this process: on the machine, and in its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
