"""scripts/faults.py: the list is complete and true, detectors that fire are seen, and so is one that does not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster import ROOT
from fault_cases import main as faults
from fault_cases.catalog import ENTRIES, find, table
from fault_cases.stage import Silent, Stage, stage
from rich.console import Console

COLLECTION = ROOT.parent / "shared" / "faults.md"
QUICK = ("sgl-24878", "sgl-30890", "sgl-30233", "vl-52234", "sgl-28651", "sgl-27162", "sgl-7338", "CVE-2025-32444")
"""Staged by default; all of them with --full."""


def test_every_report_is_in_the_list() -> None:
    if not COLLECTION.exists():
        pytest.skip("the collection of reports is not here")
    text = COLLECTION.read_text(encoding="utf-8")
    ids = set(re.findall(r"\b(?:sgl|vl|mc|ds|tks|llmd|tt|trt|dyn|ft)-\d+\b|\bCVE-\d+-\d+\b", text))
    assert len(ids) > 30
    assert ids - {one for entry in ENTRIES for one in entry.ids} == set()


def test_every_entry_is_staged_or_tested_or_explained() -> None:
    ids = [one for entry in ENTRIES for one in entry.ids]
    assert len(ids) == len(set(ids))
    for entry in ENTRIES:
        assert entry.play or entry.tests or len(entry.here.split()) > 10, entry.name
        assert [test for test in entry.tests if not (ROOT / test).exists()] == []


def test_the_table_in_the_documents_is_that_of_the_list() -> None:
    assert faults.REPORTS.read() == table(), "run scripts/faults.py history"


@pytest.mark.parametrize("arguments", [["run"], ["run", "sgl-0"], ["all", "sgl-24878"], ["burn"]])
def test_what_is_not_in_the_list_cannot_be_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        faults.main(arguments)
    assert ended.value.code == 2
    assert "faults.py" in capsys.readouterr().err


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path) as made:
        yield made


@pytest.mark.processes
@pytest.mark.timeout(300)
async def test_detectors_fire_and_a_silent_one_is_told(pair: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200)
    for name in QUICK:
        assert await faults.played(find(name), pair, console), capsys.readouterr().out
    assert f"{QUICK[0]} detected" in capsys.readouterr().out
    with pytest.raises(Silent, match="HTTP 200"):
        await pair.refused("zero:swa", "digest", "swa", 18, "unchecked")


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_staged_report_is_detected(tmp_path: Path) -> None:
    assert faults.main(["all", "--logs", str(tmp_path)]) == 0
