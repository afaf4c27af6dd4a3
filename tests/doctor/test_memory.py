"""Memory that is needed against memory that is free, on a file system made up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.doctor.findings import Level
from server.doctor.memory import LIBRARIES_NBYTES, free_memory, memory, needed_memory
from tests.doctor.support import only_error, plan_of
from tests.support.quantized_checkpoints import BASE, OFFICIAL, make_quantized

GIB = 1 << 30


def machine(root: Path, free_gib: int, cgroup: str = "0::/a/b\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {free_gib << 20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


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


def test_pools_that_do_not_fit_are_an_error_that_names_the_options(tmp_path: Path) -> None:
    words = only_error(list(memory(plan_of(pages=1_000_000), machine(tmp_path, 8))))
    assert "for 1000000 pages and 32 slots" in words
    assert "8.0 GiB free (of this machine): give fewer --pages or --slots, --dtype bfloat16" in words


@pytest.mark.parametrize(("part", "level"), [(0.5, Level.OK), (0.95, Level.WARNING), (1.01, Level.ERROR)])
def test_how_much_is_needed_decides(tmp_path: Path, part: float, level: Level) -> None:
    plan = plan_of()
    root = machine(tmp_path, 1)
    nbytes = int(needed_memory(plan).total / part)
    (root / "proc/meminfo").write_text(f"MemAvailable: {nbytes >> 10} kB\n")
    (finding,) = memory(plan, root)
    assert finding.level is level, finding


def test_half_the_bytes_with_bfloat16() -> None:
    full, half = needed_memory(plan_of(draft=True)), needed_memory(plan_of(draft=True, dtype="bfloat16"))
    assert full.weights > 1.9 * half.weights
    assert full.pools > half.pools
    assert full.total == full.weights + full.pools + LIBRARIES_NBYTES


@pytest.mark.parametrize("stored", [OFFICIAL, BASE], ids=["fp4", "fp8"])
def test_quantized_weights_need_what_they_stand_for(tmp_path: Path, stored: dict[str, Any]) -> None:
    made = make_quantized(tmp_path, draft=False, **stored)
    needed = needed_memory(plan_of(model=tmp_path))
    assert needed.weights == sum(tensor.nbytes for tensor in made.numbers.values())
