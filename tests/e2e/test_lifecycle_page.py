"""docs/lifecycle.md is what happens: one request goes through a real pair, and its functions are recorded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import lifecycle
import pytest
from walk.page import Page
from walk.way import Counts, differences

MOST_STEPS, MOST_FILES, MOST_RETURNS = 20, 24, 4
MOST_LINES_OF_A_FILE = 500


@pytest.mark.timeout(300)
def test_the_page_is_what_runs(tmp_path: Path) -> None:
    page = Page.read(lifecycle.PAGE)
    way = lifecycle.record(tmp_path)
    assert differences(page, way) == []
    counts = Counts.of(page, way)
    assert counts.steps <= MOST_STEPS, asdict(counts)
    assert counts.files <= MOST_FILES, asdict(counts)
    assert counts.returns <= MOST_RETURNS, asdict(counts)
    n_lines = {file: len((lifecycle.ROOT / file).read_text(encoding="utf-8").splitlines()) for file in way.files}
    assert {file: n for file, n in n_lines.items() if n > MOST_LINES_OF_A_FILE} == {}
