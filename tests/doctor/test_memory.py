"""Memory that is needed against memory that is free, on a file system made up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.cache.specs import LayoutError
from server.doctor.findings import Level
from server.doctor.memory import memory, needed_memory
from server.node.free_memory import memory_limit
from server.node.memory_plan import LIBRARIES_NBYTES
from tests.doctor.support import only_error, plan_of
from tests.support.machines import machine
from tests.support.quantized_checkpoints import BASE, OFFICIAL, make_quantized


def test_pools_that_do_not_fit_are_an_error_that_names_the_options(tmp_path: Path) -> None:
    words = only_error(list(memory(plan_of(pages=1_000_000), machine(tmp_path, 8))))
    assert "for 1,000,000 pages and 32 slots" in words
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
    assert full.weights.loaded > 1.7 * half.weights.loaded  # the head stays float32
    assert full.pools > half.pools
    assert full.total == full.weights.loaded + full.pools + LIBRARIES_NBYTES


def test_a_part_of_what_is_free_is_planned_as_the_node_would(tmp_path: Path) -> None:
    plan = plan_of(memory=memory_limit("0.5"))
    (finding,) = memory(plan, machine(tmp_path, 2))
    assert finding.level is Level.OK, finding
    assert "256 slots" in finding.words
    with pytest.raises(LayoutError, match="--memory 300MiB allows 300 MiB, of which"):
        list(memory(plan_of(memory=memory_limit("300MiB")), tmp_path))


@pytest.mark.parametrize("stored", [OFFICIAL, BASE], ids=["fp4", "fp8"])
def test_quantized_weights_need_what_they_stand_for(tmp_path: Path, stored: dict[str, Any]) -> None:
    made = make_quantized(tmp_path, draft=False, **stored)
    needed = needed_memory(plan_of(model=tmp_path))
    assert needed.weights.loaded == sum(tensor.nbytes for tensor in made.numbers.values())


def test_quantized_rows_take_less() -> None:
    own, fp8 = needed_memory(plan_of(draft=True)), needed_memory(plan_of(draft=True, kv_dtype="fp8"))
    fp8_keys = needed_memory(plan_of(draft=True, kv_dtype="fp8", index_dtype="fp8"))
    assert own.weights == fp8.weights
    assert own.pools > fp8_keys.pools > fp8.pools
