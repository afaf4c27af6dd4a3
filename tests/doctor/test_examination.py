"""The whole of it: deadlines, crashes, libraries that cannot be imported, and the command lines of both roles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from server.doctor import child
from server.doctor.examination import Check, examine, run_check
from server.doctor.findings import Finding, Level, error, ok, warning
from server.doctor.plan import NodePlan
from tests.doctor.support import only_error, plan_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_check_that_hangs_is_an_error_and_the_next_is_made() -> None:
    never = threading.Event()

    def hang(_plan: NodePlan) -> Iterator[Finding]:
        never.wait()
        yield ok("disk", "")

    assert only_error(run_check(Check("disk", hang, 0.05), plan_of())).startswith("no answer within 0.05 s")
    never.set()


def _finds(make: Callable[[str, str], Finding], _plan: NodePlan) -> list[Finding]:
    return [make("x", "words  of\nit")]


@pytest.mark.parametrize(("found", "code"), [([ok, warning], 0), ([ok, error, warning], 1)])
def test_errors_alone_decide_the_exit_code(
    capsys: pytest.CaptureFixture[str], found: list[Callable[[str, str], Finding]], code: int
) -> None:
    checks = [Check("x", partial(_finds, make)) for make in found]
    assert examine(plan_of(doctor="text"), checks) == code
    *lines, _empty, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [[make.__name__, "x", "words", "of", "it"] for make in found]
    assert last.startswith(f"{code} error")
    assert examine(plan_of(doctor="json"), checks) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


def module(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "raise ImportError('libibverbs.so.1: cannot open')",
            "system library that is missing (libibverbs.so.1",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was ended by SIGILL"),
        ("import os; os._exit(3)", "ended with 3"),
    ],
)
def test_mooncake_that_does_not_load_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    module(tmp_path, "mooncake/__init__.py", "")
    module(tmp_path, "mooncake/engine.py", code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert words in only_error(list(child.transfer(plan_of())))


@pytest.mark.processes
def test_mooncake_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "mooncake/__init__.py", "import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    request = {"host": "127.0.0.1", "transport": "tcp", "device": "cpu"}
    assert "no answer within 2 s" in only_error(list(child.ask(["transfer"], request, timeout_s=2)))


@pytest.mark.processes
def test_what_comes_after_a_crash_is_tried_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "mooncake/__init__.py", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    module(tmp_path, "torch/__init__.py", "raise ImportError('no libtorch')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    request = {"host": "127.0.0.1", "transport": "tcp", "device": "cpu"}
    found = list(child.ask(["torch", "transfer", "torch"], request))
    assert [finding.subject for finding in found] == ["torch", "transfer", "torch"]
    assert "ended by SIGSEGV" in found[1].words
    assert "no libtorch" in found[2].words


def doctor(role: str, *options: str, **env: str) -> tuple[int, list[Finding]]:
    """A launcher as a process of its own: its exit code and findings."""
    done = subprocess.run(
        [sys.executable, "-m", f"server.{role}", "--doctor", "json", *options],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert done.stderr == ""
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, [Finding(Level(f["level"]), f["subject"], f["words"]) for f in findings]


@pytest.mark.processes
def test_a_prefill_node_that_would_work_has_no_error() -> None:
    code, findings = doctor("prefill", "--port", "0", "--bootstrap-port", "0")
    assert [finding for finding in findings if finding.level is Level.ERROR] == []
    assert code == 0
    (transfer,) = [finding.words for finding in findings if finding.subject == "transfer"]
    assert "1 MiB of cpu memory over tcp" in transfer
    assert "on both sides" in transfer


@pytest.mark.processes
def test_without_torch_the_rest_is_examined_all_the_same(tmp_path: Path) -> None:
    module(tmp_path, "torch/__init__.py", "raise ImportError('libtorch.so: no such file')")
    path = f"{tmp_path}:{ROOT}"
    code, findings = doctor("decode", "--port", "0", PYTHONPATH=path)
    by_subject = {finding.subject: finding for finding in findings}
    assert code == 1
    assert by_subject["torch"].words.startswith("cannot be imported (ImportError: libtorch.so: no such file)")
    assert by_subject["memory"].level is Level.OK
    assert by_subject["transfer"].level is Level.OK
