"""The README's table and the picture come from docs/bench.json, and from nothing else."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from benchmark import documents
from benchmark.documents import PICTURE, README, REPORT, markdown, parts_of_readme, picture_of, read_report
from benchmark.measurement import Measurement
from benchmark.picture import Axis, Chart, decades, picture

SETTING = {"machine": "a CPU", "cpus": 2, "threads": 1, "date": "2026-01-02", "torch": "2.1", "transformers": "5.0"}


def test_readme_shows_what_the_report_says() -> None:
    shown = parts_of_readme()[1]
    assert shown == (markdown(read_report()) if REPORT.exists() else "")


def test_picture_shows_what_the_report_says() -> None:
    assert PICTURE.exists() is REPORT.exists()
    if REPORT.exists():
        assert PICTURE.read_text(encoding="utf-8") == picture_of(read_report())


def measurement(part: str, unit: str, size: dict[str, Any], **values: float) -> Measurement:
    m = Measurement(part, part, unit, size=size)
    for name, value in values.items():
        m.add(name, value)
    return m


def everything() -> list[Measurement]:
    """A few of every kind of measurement that the documents show."""
    decode = []
    for n, engine in ((1, 4000.0), (16, 9000.0)):
        size = {"checkpoint": "bundled", "dtype": "float32", "requests": n}
        m = measurement("decode", "tokens/s", size, engine=engine, transformers=100.0)
        m.ratios, m.details = (("engine", "transformers"),), {"kernels": "cpu-1"}
        decode.append(m)
    ttft = measurement("ttft", "ms", {"checkpoint": "bundled", "tokens": 2048}, PD=26.0, local=20.0)
    ttft.ratios, ttft.differences = (("PD", "local"),), (("PD", "local"),)
    growth = []
    for n in (512, 32768):
        m = measurement("growth", "ms", {"checkpoint": "bundled", "tokens": n}, PD=n / 20, local=n / 25)
        m.details = {"moved_nbytes": 100 * n, "step_ms": {"PD": 0.5, "local": 0.6}}
        growth.append(m)
    itl = measurement("itl", "ms", {"figure": "p99", "streams": 8, "prompt_tokens": 4096}, PD=2.0, local=20.0)
    itl.details = {"curve_percent": [1, 50, 99, 99.9], "curve_ms": {"PD": [1, 1, 2, 3], "local": [0.0, 2, 20, 30]}}
    drafts = measurement("speculation", "ms", {"requests": 8}, **{"k = 0": 2.0, "k = 1": 1.5})
    drafts.ratios, drafts.details = (("k = 1", "k = 0"),), {"accept_length": {"k = 0": 1.0, "k = 1": 1.8}}
    return [*decode, ttft, *growth, itl, drafts]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("README", "REPORT", "PICTURE", "ROOT"):
        monkeypatch.setattr(documents, name, tmp_path / Path(getattr(documents, name)).name)
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(f"before\n{documents.BEGIN}\n{documents.END}\nbehind\n")
    return tmp_path


def test_sizes_of_one_thing_are_one_row(folder: Path) -> None:
    documents.write_documents(SETTING, everything())
    table = documents.parts_of_readme()[1]
    row = "| decode; bundled, float32 | 1 / 16 requests | 4,000 / 9,000 tokens/s | engine / transformers: 40 / 90 |"
    assert row in table.splitlines()
    assert "PD / local: 1.30; PD minus local: 6.00 ms" in table
    assert "to k = 0: 0.75; accept length 1.80" in table
    assert "a CPU, 2 CPUs; threads of one operation, in every process: 1; 2026-01-02; kernels cpu-1, torch" in table


def test_writing_twice_changes_nothing(folder: Path) -> None:
    documents.write_documents(SETTING, everything())
    first = (folder / "README.md").read_text()
    documents.write_documents(SETTING, everything())
    assert (folder / "README.md").read_text() == first
    assert first.startswith("before\n")
    assert first.endswith("behind\n")


def test_a_report_of_another_version_is_refused(folder: Path) -> None:
    (folder / "bench.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match="version 1, expected 2"):
        documents.read_report()


def test_a_readme_without_markers_is_named(folder: Path) -> None:
    (folder / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match="bench: begin"):
        documents.parts_of_readme()


def test_the_picture_has_a_line_for_every_series(folder: Path) -> None:
    documents.write_documents(SETTING, everything())
    drawn = ET.parse(folder / "bench.svg")
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    texts = {text.text for text in drawn.iterfind(".//svg:text", namespace)}
    assert {"state moved, MB", "time to the first token, PD, ms", "one step of one request, local, ms"} <= texts
    assert len(drawn.findall(".//svg:polyline", namespace)) == 5 + 2


def test_points_lie_where_their_axes_say() -> None:
    chart = Chart("t", Axis("x", [(1.0, "1"), (100.0, "100")]), Axis("y", decades([2.0, 50.0])), {"a": [(10.0, 10.0)]})
    assert 'points="284.0,184.0"' in picture([chart])


def test_readme_and_report_lie_in_the_project() -> None:
    assert README.is_file()
    assert REPORT.parent.is_dir()
