"""docs/lifecycle.md is what happens: one request goes through a real pair, and its functions are recorded."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from cluster.node import ROOT
from walk import main as walk
from walk.page import Page
from walk.way import Counts, differences

from server.kernels.choice import choose_kernels

MOST_STEPS, MOST_FILES, MOST_RETURNS = 20, 24, 4
MOST_LINES_OF_A_FILE = 500
NEAR_LINES = 100


@pytest.mark.timeout(300)
def test_the_page_is_what_runs(tmp_path: Path) -> None:
    if (kernels := choose_kernels("auto", "cpu")).library is None:
        pytest.skip(f"the page says what runs with kernels: {kernels.reason}")
    page = Page.read(walk.PAGE)
    way = walk.record(tmp_path)
    assert differences(page, way) == []
    counts = Counts.of(page, way)
    assert counts.steps <= MOST_STEPS, asdict(counts)
    assert counts.files <= MOST_FILES, asdict(counts)
    assert counts.returns <= MOST_RETURNS, asdict(counts)
    assert_the_readme_says(counts)
    n_lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in way.files}
    assert {file: n for file, n in n_lines.items() if n > MOST_LINES_OF_A_FILE} == {}


def assert_the_readme_says(counts: Counts) -> None:
    """Steps and files exactly, lines to within a hundred."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"in {counts.steps} steps through {counts.files} files" in text, asdict(counts)
    said = re.search(r"about ([\d,]+) lines of functions that really run \(and ([\d,]+) beside", text)
    assert said is not None
    lines, beside = (int(number.replace(",", "")) for number in said.groups())
    assert abs(lines - counts.lines) <= NEAR_LINES, asdict(counts)
    assert abs(beside - counts.lines_beside) <= NEAR_LINES, asdict(counts)
