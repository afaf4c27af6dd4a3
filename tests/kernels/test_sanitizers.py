"""The tests of the kernels with a build in which an access outside of an array, or undefined behaviour, is fatal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.kernels.build import Isa, NoCompiler, Target, build, find_compiler, isas_of_machine
from server.kernels.library import CHOICE_VARIABLE, NEEDED_FLAGS, cpu_flags

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
ISAS = [isa for isa in dict.fromkeys((*isas_of_machine(), Isa.GENERIC)) if NEEDED_FLAGS[isa] <= cpu_flags()]
FEW = ("tests/kernels/test_lanes.py", "tests/kernels/test_check.py", "tests/engine/test_sampler.py")
WITHOUT_KERNELS = ("test_build.py", "test_library.py", "test_choice.py", "test_sanitizers.py")
WRONG = """
#pragma GCC visibility push(default)
extern "C" int outside(int i) { int* few = new int[4](); const int x = few[i]; delete[] few; return x; }
extern "C" int overflow(int i) { return 0x7fffffff + i; }
"""


@pytest.fixture(scope="module")
def runtime() -> Path:
    """The sanitizers' own library, which must be loaded first. Skips where there is no compiler, or one without it."""
    try:
        command = [*find_compiler(), "-print-file-name=libasan.so"]
    except NoCompiler as error:
        pytest.skip(str(error))
    path = Path(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
    if not path.is_absolute():
        pytest.skip("the compiler has no libasan")
    return path


def run(runtime: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )


def check(runtime: Path, isa: Isa, *tests: str) -> None:
    target = Target(isa, sanitized=True)
    build([target])
    done = run(runtime, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, **{CHOICE_VARIABLE: target.name})
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize(("call", "said"), [("outside(4)", "heap-buffer-overflow"), ("overflow(1)", "signed integer")])
def test_the_build_with_sanitizers_ends_a_process_that_does_wrong(
    runtime: Path, tmp_path: Path, call: str, said: str
) -> None:
    (tmp_path / "wrong.cpp").write_text(WRONG)
    [path] = build([Target(Isa.GENERIC, sanitized=True)], sources=tmp_path, folder=tmp_path)
    done = run(runtime, "-c", f"import ctypes; ctypes.CDLL({str(path)!r}).{call}")
    assert done.returncode != 0
    assert said in done.stderr


def test_a_few_tests_of_the_kernels_run_clean(runtime: Path) -> None:
    check(runtime, ISAS[0], *FEW, "-k", "not numpy")


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
def test_all_tests_of_the_kernels_run_clean(runtime: Path, isa: Isa) -> None:
    ignored = (f"--ignore=tests/kernels/{name}" for name in WITHOUT_KERNELS)
    check(runtime, isa, "tests/kernels", "tests/engine/test_sampler.py", *ignored)
