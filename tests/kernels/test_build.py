"""The build of the kernels: what is built, what its name says, and what happens where it cannot be built."""

from __future__ import annotations

import ctypes
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.kernels import build as building
from server.kernels.build import BuildFailed, Isa, NoCompiler, Target, build, isas_of_machine, library_path

pytestmark = pytest.mark.processes

GENERIC = Target(Isa.GENERIC)
SOURCE = """
#pragma GCC visibility push(default)
extern "C" int answer() { return ANSWER; }
#pragma GCC visibility pop
int inside() { return 1; }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources of a library with one function that returns 42."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\n' + SOURCE)
    return folder


def compiler(folder: Path, text: str) -> str:
    """An executable that stands for a compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_library_has_only_what_the_header_exports(sources: Path, tmp_path: Path) -> None:
    [path] = build([GENERIC], sources=sources, folder=tmp_path / "built")
    assert answer(path) == 42
    assert not hasattr(ctypes.CDLL(str(path)), "_Z6insidev")
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_second_build_compiles_nothing(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build([GENERIC], sources=sources, folder=tmp_path / "built")
    monkeypatch.setenv("CXX", "/absent/compiler")
    assert build([GENERIC], sources=sources, folder=tmp_path / "built") == first


@pytest.mark.parametrize("name", ["answer.h", "answer.cpp"])
def test_changed_sources_have_another_name_and_replace_the_old_library(
    sources: Path, tmp_path: Path, name: str
) -> None:
    [old] = build([GENERIC], sources=sources, folder=tmp_path / "built")
    changed = (sources / name).read_text().replace("42", "43").replace("ANSWER;", "ANSWER + 1;")
    (sources / name).write_text(changed)
    [new] = build([GENERIC], sources=sources, folder=tmp_path / "built")
    assert answer(new) == 43
    assert [path.name for path in new.parent.iterdir()] == [new.name] != [old.name]


def test_flags_are_in_the_name(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library_path(GENERIC, sources=sources)
    assert before.name.startswith("kernels-generic-")
    assert library_path(Target(Isa.GENERIC, sanitized=True), sources=sources).name.startswith(
        "kernels-generic-sanitized"
    )
    monkeypatch.setattr(building, "COMMON_FLAGS", (*building.COMMON_FLAGS, "-DX"))
    assert library_path(GENERIC, sources=sources) != before


def test_concurrent_builds_end_with_one_whole_library(sources: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(build, [GENERIC], sources=sources, folder=tmp_path / "built") for _ in range(3)]
        paths = {path for job in jobs for path in job.result(timeout=100)}
    [path] = paths
    assert answer(path) == 42
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_compiler_that_fails_is_reported_with_its_words_and_leaves_nothing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo no space left >&2; exit 3"))
    with pytest.raises(BuildFailed, match=r"(?s)generic do not compile.*ended with 3.*no space left"):
        build([GENERIC], sources=sources, folder=tmp_path / "built")
    assert list((tmp_path / "built").iterdir()) == []


def test_a_compiler_that_hangs_is_ended(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(building, "COMPILE_TIMEOUT_S", 0.2)
    with pytest.raises(BuildFailed, match="timed out"):
        build([GENERIC], sources=sources, folder=tmp_path / "built")


@pytest.mark.parametrize(
    ("named", "reason"), [("absent-compiler -x", "absent-compiler is not installed"), ("", "CXX is empty")]
)
def test_no_compiler_is_an_error_of_its_own(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(NoCompiler, match=reason):
        build([GENERIC], sources=sources, folder=tmp_path / "built")


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(BuildFailed, match=r"has no \.cpp file"):
        build([GENERIC], sources=tmp_path / "src", folder=tmp_path / "built")


def test_what_a_machine_needs() -> None:
    assert isas_of_machine("x86_64") == (Isa.AVX512, Isa.AVX2)
    assert isas_of_machine("aarch64") == (Isa.GENERIC,)


@pytest.mark.parametrize(
    ("named", "code", "said"),
    [("absent-compiler", 0, "model in Python will run"), ("", 0, "CXX is empty"), ("false", 1, "do not compile")],
)
def test_command_fails_for_a_broken_compiler_and_only_tells_of_none(
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.setenv("CXX", named)
    places = ["--sources", str(sources), "--folder", str(tmp_path / "built")]
    assert building.main([*places, "--isa", "generic"]) == code
    assert said in capsys.readouterr().err


def test_command_says_nothing_where_all_is_built(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--sources", str(sources), "--folder", str(tmp_path / "built"), "--isa", "generic"]
    assert building.main(places) == 0
    assert "generic" in capsys.readouterr().err
    assert building.main(places) == 0
    assert capsys.readouterr().err == ""


def test_command_refuses_an_unknown_instruction_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        building.main(["--isa", "sse9"])
    assert "sse9" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("isa", isas_of_machine())
def test_sources_compile_without_a_warning(isa: Isa, tmp_path: Path) -> None:
    made = building.find_compiler()
    files = [str(path) for path in sorted(building.SOURCES.glob("*.cpp"))]
    done = subprocess.run(
        [*made, *Target(isa).flags, "-Werror", *files, "-o", str(tmp_path / "library.so")],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
