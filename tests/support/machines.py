"""A file system that says how much memory a machine has."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def machine(root: Path, free_gib: int, cgroup: str = "0::/a/b\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {free_gib << 20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root
