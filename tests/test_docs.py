"""What the documents say is true: components, numbers, paths, links and options."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import benchmark.main as bench
import checkpoint_making.main as make_checkpoint
import cuda_check.main as cuda_check
import demo.main as demo
import fault_cases.main as faults
import fuzzing.main as fuzz
import large_checkpoint.main as large_checkpoint
import planning.main as plan
import pytest
import soaking.main as soak
import timeline.main as timeline
import walk.main as walk
from evaluation import gsm8k, knockout

from server.cache.layout import ArenaLayout
from server.cache.live import LIVE_RULES, live_positions
from server.cache.row_formats import QUANTIZED_ROWS, Fp8IndexRow, Fp8KvRow, Mxfp4IndexRow
from server.cache.specs import CacheGeometry
from server.decode import launch as decode_launch
from server.model.checkpoint import has_draft
from server.model.config import load_config
from server.model.state import state_components
from server.node.options import BUNDLED_MODEL
from server.prefill import launch as prefill_launch
from tests.support.examples import DOCUMENTS, README, commands

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = ROOT / "docs" / "layout.md"
FOLDERS = ("server", "scripts", "tests", "docs", "docker")
NOT_OURS = {
    *("--pd-disaggregation", "--decode", "--policy", "--prometheus-host", "--cb-timeout-duration-secs"),  # the routers'
    *("--from-file", "--build", "--build-arg"),  # of kubectl and docker
}
"""Options of other programs."""
SET = re.compile(r"[A-Z_]+=")
"""A variable that is set for one command."""
PROGRAMS: dict[str, Callable[[list[str]], object]] = {
    "launch_prefill": prefill_launch.main,
    "launch_decode": decode_launch.main,
    "quickstart": demo.parse_args,
    "gsm8k.py": gsm8k.parse_args,
    "bench.py": bench.parse_args,
    "knockout.py": knockout.main,
    "soak.py": soak.main,
    "faults.py": faults.main,
    "fuzz.py": fuzz.main,
    "lifecycle.py": walk.main,
    "explain.py": timeline.main,
    "check_cuda.py": cuda_check.parse_args,
    "make_checkpoint.py": make_checkpoint.parse_args,
    "large_checkpoint.py": large_checkpoint.parse_args,
    "plan.py": plan.parse_args,
}
RUN_ELSEWHERE = ("curl", "test", "-m", "kubectl", "(umask", "setup")
"""``curl`` against a real pair; ``scripts/test`` runs this; ``-m`` (of Python) starts the router, which is not ours."""


def tables(document: Path) -> Iterator[list[list[str]]]:
    """Every table as rows of cells, its head first."""
    rows: list[list[str]] = []
    for line in [*document.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            yield [row for row in rows if not set(row[0]) <= {"-", ":"}]
            rows = []


def component_tables(document: Path) -> list[list[list[str]]]:
    """The tables about components, without their heads."""
    return [rows[1:] for rows in tables(document) if rows[0][0] == "component"]


def words_like(document: Path, pattern: str) -> set[str]:
    return set(re.findall(pattern, document.read_text(encoding="utf-8")))


@pytest.mark.parametrize("document", [README, LAYOUT], ids=lambda path: path.name)
def test_tables_name_every_component_in_order(document: Path) -> None:
    everything = [f"`{c.name}`" for c in state_components(load_config(BUNDLED_MODEL), "float32", draft=True)]
    found = [[row[0] for row in rows] for rows in component_tables(document) if rows[0][1] in ("page", "slot")]
    assert found == [everything]


def test_live_table_has_a_row_for_every_rule() -> None:
    (rows,) = [rows for rows in component_tables(LAYOUT) if "n//4" in rows[0][1]]
    assert sorted(row[0].strip("`") for row in rows) == sorted(LIVE_RULES)


@pytest.mark.parametrize("n", [1, 3, 4, 63, 64, 65, 127, 128, 300, 513])
def test_live_table_says_what_the_code_says(n: int) -> None:
    (rows,) = [rows for rows in component_tables(LAYOUT) if "n//4" in rows[0][1]]
    for row in rows:
        name, written = row[0].strip("`"), row[1]
        if name == "handoff":
            continue
        first, last = written.split(" ", 1)[1].split(" .. ")
        live = live_positions(n, 64, [name])[name]
        numbers = range(_value(first, n), _value(last, n) + 1)
        assert list(live) == list(numbers), f"{name} at n = {n}: {written}"


def _value(formula: str, n: int) -> int:
    """One end of a range as it is written in the table, such as ``max(0, 4(n//4)-4)``, for window 64."""
    value = eval(re.sub(r"(\d)\(", r"\1*(", formula), {"max": max}, {"n": n, "W": 64})
    assert isinstance(value, int)
    return value


def test_worked_example_has_the_numbers_of_the_bundled_model() -> None:
    config = load_config(BUNDLED_MODEL)
    components = state_components(config, "float32", draft=has_draft(BUNDLED_MODEL))
    layout = ArenaLayout.from_geometry(CacheGeometry(256, 257, 33, config.sliding_window, 0, components))
    live, nbytes = live_positions(300, layout.window, layout.names), layout.live_nbytes(300)
    expected = []
    for c in layout.components:
        rows = f"{live[c.name].start} .. {live[c.name].stop - 1}" if live[c.name] else "none"
        numbers = (f"{c.row_nbytes:,}", f"{c.rows}", f"{c.rows * c.row_nbytes:,}", rows, f"{nbytes[c.name]:,}")
        expected.append([f"`{c.name}`", *numbers])
    text = LAYOUT.read_text(encoding="utf-8")
    assert component_tables(LAYOUT)[-1] == expected
    assert f"{layout.page_nbytes:,} bytes. The arena" in text
    assert f"{layout.nbytes:,} bytes.\n" in text
    assert f"{sum(nbytes.values()):,} bytes. The bound" in text


def test_worked_example_has_the_numbers_of_quantized_rows() -> None:
    config = load_config(BUNDLED_MODEL)
    components = state_components(config, "float32", draft=True, kv_dtype="fp8")
    layout = ArenaLayout.from_geometry(CacheGeometry(256, 257, 33, config.sliding_window, 0, components))
    said = LAYOUT.read_text(encoding="utf-8").rpartition("With `--kv-dtype fp8`")[2].replace("\n", " ")
    rows = dict(re.findall(r"`(\w+)`(?: has)? (\d+)", said))
    assert rows == {c.name: str(c.row_nbytes) for c in layout.components if c.dtype in QUANTIZED_ROWS}
    moved = sum(layout.live_nbytes(300).values())
    assert f"{moved:,} bytes, a page is {layout.page_nbytes:,} bytes, and the arena {layout.nbytes:,}." in said


def test_tables_of_row_formats_have_the_offsets_of_the_code() -> None:
    kv, mxfp4, fp8 = (rows[1:] for rows in tables(LAYOUT) if rows[0][0] == "what")
    for column, row in ((1, Fp8KvRow(448, 64)), (2, Fp8KvRow(24, 8))):
        starts = [0, row.rope_offset, row.scale_offset, row.scale_offset + row.n_scales]
        assert [_ends(line[column]) for line in kv] == list(pairwise([*starts, row.nbytes]))
    for table, format_ in ((mxfp4, Mxfp4IndexRow), (fp8, Fp8IndexRow)):
        for column, width in ((1, 128), (2, 16)):
            offset, nbytes = format_(width).scale_offset, format_(width).nbytes
            assert [_ends(line[column]) for line in table] == [(0, offset), (offset, nbytes)]


def _ends(cell: str) -> tuple[int, int]:
    """``0 .. 447`` or ``8`` as start and stop."""
    first, _, last = cell.partition(" .. ")
    return int(first), int(last or first) + 1


def test_readme_says_whether_the_bundled_checkpoint_has_a_draft() -> None:
    says_none = "bundled checkpoint has no NextN draft layer" in README.read_text(encoding="utf-8")
    assert says_none is not has_draft(BUNDLED_MODEL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    pattern = rf"(?<![\w/.:-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w/?"
    named = words_like(document, pattern)
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in document.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    }
    for target in words_like(document, r"\]\(([^)\s]+)\)"):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (document.parent / target.partition("#")[0]).exists(), target


def help_of(main: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["--help"])
    return capsys.readouterr().out


def test_named_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (
        prefill_launch.main,
        decode_launch.main,
        demo.parse_args,
        gsm8k.parse_args,
        bench.parse_args,
        knockout.main,
        soak.main,
        faults.main,
        fuzz.main,
        walk.main,
        timeline.parse_args,
        make_checkpoint.parse_args,
        large_checkpoint.parse_args,
        plan.parse_args,
    )
    helps = "".join(help_of(command, capsys) for command in commands)
    for script in ("setup", "test"):
        shown = subprocess.run([ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=True)
        helps += shown.stdout
    known = set(re.findall(r"--[a-z][a-z-]*", helps))
    for document in DOCUMENTS:
        named = words_like(document, r"(?<![\w-])--[a-z][a-z-]*")
        assert named - known - NOT_OURS == set(), document.name


class Understood(Exception):
    """A parser took a command line."""


def test_every_command_in_the_documents_is_understood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its own parser. The examples with an answer are run in tests/e2e/test_quickstart.py and test_processes.py."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(parser, *args, **kwargs)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    n_understood = 0
    for document in DOCUMENTS:
        for command in commands(document):
            program, *arguments = [word for word in command if word != ".venv/bin/python" and not SET.match(word)]
            if Path(program).name not in RUN_ELSEWHERE:
                outcome = outcome_of(PROGRAMS[Path(program).name], arguments)
                assert outcome == 0, f"{document.name}: {command}: {capsys.readouterr().err}"
                n_understood += 1
    assert n_understood > 10


def outcome_of(main: Callable[[list[str]], object], arguments: list[str]) -> object:
    """0 if the parser took the arguments, or showed its help; else its exit code."""
    try:
        main(arguments)
    except Understood:
        return 0
    except SystemExit as ended:
        return ended.code or 0
    return "it ran without parsing"
