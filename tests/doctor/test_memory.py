"""Memory that is needed against memory that is free, on a file system made up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.doctor.findings import Level
from server.doctor.memory import LIBRARIES_NBYTES, memory, needed_memory
from tests.doctor.support import only_error, plan_of
from tests.support.machines import machine
from tests.support.quantized_checkpoints import BASE, OFFICIAL, make_quantized


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
