"""Free memory of the machine and of control groups, on a file system made up for it."""

from __future__ import annotations

from pathlib import Path

from server.node.free_memory import free_memory
from tests.support.machines import GIB, machine


def group(folder: Path, limit: str, used_gib: int, cache_gib: int = 0, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(str(used_gib * GIB))
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache_gib * GIB}\n")


def test_the_machine_alone(tmp_path: Path) -> None:
    free = free_memory(machine(tmp_path, 8))
    assert (free.nbytes, free.limit) == (8 * GIB, "of this machine")


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, 32)
    group(root / "sys/fs/cgroup/a/b", "max", 1)
    group(root / "sys/fs/cgroup/a", str(6 * GIB), 3, cache_gib=1)
    free = free_memory(root)
    assert (free.nbytes, free.limit) == (4 * GIB, "by the limit of the control group sys/fs/cgroup/a")


def test_a_container_sees_its_group_as_the_top_one(tmp_path: Path) -> None:
    root = machine(tmp_path, 32, "0::/docker/of/outside\n")
    group(root / "sys/fs/cgroup", str(2 * GIB), 1)
    assert free_memory(root).nbytes == GIB


def test_version_one_groups_count_too(tmp_path: Path) -> None:
    root = machine(tmp_path, 32, "5:cpu:/x\n4:memory:/x\n0::/\n")
    group(root / "sys/fs/cgroup/memory/x", str(3 * GIB), 1, version=1)
    group(root / "sys/fs/cgroup/memory", str((1 << 63) - 4096), 9, version=1)
    assert free_memory(root).nbytes == 2 * GIB
