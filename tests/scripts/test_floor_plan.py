"""scripts/ is entry points of a few lines and a folder for each tool, all on scripts/cluster/. Imports go one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ARROWS: dict[str, tuple[str, ...]] = {
    "cluster": (),
    "hostile": ("cluster",),
    "fuzzing": ("cluster", "hostile"),
    "soaking": ("cluster", "hostile"),
    "fault_cases": ("cluster", "hostile"),
    "evaluation": ("cluster",),
    "benchmark": ("cluster", "evaluation", "checkpoint_making"),
    "demo": ("cluster", "evaluation"),
    "tiny": ("benchmark", "evaluation"),
    "cuda_check": ("benchmark", "cluster", "evaluation"),
    "walk": ("cluster",),
    "timeline": ("cluster",),
    "checkpoint_making": (),
    "planning": ("checkpoint_making",),
}
"""Which other folders each folder may import."""
FEW_LINES = 80


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_folders_import_each_other_along_the_arrows() -> None:
    folders = {path.parent.name for path in SCRIPTS.glob("*/*.py")}
    assert folders == set(ARROWS)
    for folder in folders:
        used = {name.split(".")[0] for path in (SCRIPTS / folder).rglob("*.py") for name in imported(path)}
        assert used & folders - {folder} <= set(ARROWS[folder]), folder


def test_an_entry_point_has_a_few_lines() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SCRIPTS.glob("*.py")}
    assert {name: n for name, n in lengths.items() if n > FEW_LINES} == {}
