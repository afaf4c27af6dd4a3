"""The way of a request is compared with the page that describes it, and every difference is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from walk.page import Page, Place
from walk.recorder import Calls, Recorder
from walk.way import Counts, Way, Window, differences

PAGE = """
| # | node | where | what |
|---|---|---|---|
| 1 | D | `server/api/a.py::ask` `server/decode/b.py::Manager.open` | a request comes |
| 2 | P | `server/prefill/c.py::take` | and goes over |
| 3 | D | `server/decode/b.py::Manager.commit` | and back |
| 4 (after 2) | P | `server/prefill/c.py::end` | while the other node goes on |

- `server/node/log.py`
"""
IDLE, REQUEST = Window(0, 1_000_000), Window(2_000_000, 3_000_000)


def call(file: str, function: str, *at_us: int, n_lines: int = 10) -> Calls:
    return Calls(f"server/{file}.py", function, n_lines, [2_000_000 + 1000 * us for us in at_us])


@pytest.fixture
def page(tmp_path: Path) -> Page:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return Page.read(path)


def recorded() -> dict[str, list[Calls]]:
    decode = [
        call("api/a", "ask", 10),
        call("decode/b", "Manager.open", 20),
        call("decode/b", "Manager.commit", 200),
        call("node/log", "line", 220, n_lines=3),
        Calls("server/node/ticker.py", "tick", 10, [500_000, 2_500_000]),
    ]
    return {"D": decode, "P": [call("prefill/c", "take", 100), call("prefill/c", "end", 120)]}


def way(calls: dict[str, list[Calls]]) -> Way:
    return Way.of(calls, IDLE, REQUEST)


def test_a_true_page_has_no_differences_and_its_way_is_counted(page: Page) -> None:
    walked = way(recorded())
    assert differences(page, walked) == []
    assert Counts.of(page, walked) == Counts(
        steps=4, stays=5, files=3, returns=2, folder_changes=4, lines=50, files_beside=1, lines_beside=3
    )


def test_a_step_that_did_not_run_is_named(page: Page) -> None:
    calls = recorded()
    calls["P"] = [call("prefill/c", "end", 120)]
    assert differences(page, way(calls)) == ["step 2: server/prefill/c.py::take did not run on P"]


def test_a_step_that_ran_too_early_is_named(page: Page) -> None:
    calls = recorded()
    calls["P"] = [call("prefill/c", "take", 15), call("prefill/c", "end", 120)]
    assert differences(page, way(calls)) == ["step 2: server/prefill/c.py::take ran before what it follows"]


def test_a_file_that_the_page_leaves_out_is_named(page: Page) -> None:
    calls = recorded()
    calls["D"].append(call("decode/verify", "verify", 150))
    assert differences(page, way(calls)) == ["server/decode/verify.py ran and is not on the page"]


def test_a_file_beside_the_way_that_never_runs_is_named(page: Page) -> None:
    calls = recorded()
    calls["D"] = [each for each in calls["D"] if each.file != "server/node/log.py"]
    assert differences(page, way(calls)) == ["server/node/log.py is on the page and did not run"]


def test_what_runs_on_an_idle_node_too_is_no_part_of_the_way(page: Page) -> None:
    assert Place("server/node/ticker.py", "tick") not in way(recorded()).calls["D"]


def test_calls_are_recorded_with_their_qualified_names() -> None:
    recorder = Recorder(Path(__file__).parent)

    class Thing:
        def method(self) -> None: ...

    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        Thing().method()
    finally:
        sys.setprofile(before)
    [found] = recorder.calls()
    assert found.file == "tests/scripts/test_walk.py"
    assert found.function == "test_calls_are_recorded_with_their_qualified_names.Thing.method"
    assert len(found.at) == found.n_lines == 1
