"""Which library of kernels is loaded, and why there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.kernels import library as loading
from server.kernels.build import BUILT, Isa, Target, isas_of_machine, library_path
from server.kernels.errors import KernelsUnavailable
from server.kernels.library import CHOICE_VARIABLE, cpu_flags, load
from tests.support.kernel_functions import functions

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(isas_of_machine()[0] is not Isa.AVX512, reason="about the instruction sets of x86-64")


def cpu_without(*flags: str) -> frozenset[str]:
    return frozenset(loading.NEEDED_FLAGS[Isa.AVX512] - set(flags))


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    functions(Isa.AVX2)


def test_a_cpu_with_avx2_alone_takes_that(no_choice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_flags", lambda: cpu_without("avx512bw"))
    assert load().target == Target(Isa.AVX2)


def test_a_cpu_without_avx2_has_no_kernels_and_says_why(no_choice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_flags", lambda: cpu_without("avx2", "fma"))
    with pytest.raises(KernelsUnavailable, match="need a CPU with AVX2 and FMA: this one has no avx2, fma"):
        load()
    monkeypatch.setattr(loading, "cpu_flags", frozenset)
    with pytest.raises(KernelsUnavailable, match="this one has no abm, avx2"):
        load()


def test_a_build_that_the_cpu_cannot_run_is_refused(no_choice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_flags", lambda: cpu_without("avx512vl"))
    with pytest.raises(KernelsUnavailable, match="cannot run the avx512 kernels: no avx512vl"):
        load(Target(Isa.AVX512), folder=BUILT / "..")


def test_the_variable_forces_a_build_and_refuses_an_unknown_one(
    no_choice: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "avx2")
    assert load().target == Target(Isa.AVX2)
    monkeypatch.setenv(CHOICE_VARIABLE, "sse9")
    with pytest.raises(KernelsUnavailable, match="sse9 names no build; there are avx512, avx512-sanitized"):
        load()


def test_what_is_not_built_or_stale_or_broken_is_named(no_choice: None, tmp_path: Path) -> None:
    target = Target(Isa.AVX2)
    with pytest.raises(KernelsUnavailable, match=r"are not built: run python -m server.kernels.build --isa avx2"):
        load(target, folder=tmp_path)
    (tmp_path / "kernels-avx2-0123456789abcdef.so").touch()
    with pytest.raises(KernelsUnavailable, match="were built from other sources"):
        load(target, folder=tmp_path)
    library_path(target, folder=tmp_path).write_bytes(b"not a library")
    with pytest.raises(KernelsUnavailable, match="avx2 kernels do not load"):
        load(target, folder=tmp_path)


def test_flags_are_read_from_what_the_system_says(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(path) == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "absent") == frozenset()


FORKS = """
import os, sys
from server.kernels.library import load
from tests.kernels.test_library import threaded_draws
library = load()
names = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line}
assert len(names) == 1 and "torch" in names.pop(), names
expected = None
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(0 if threaded_draws(2) == threaded_draws(1) else 1)
    assert os.waitpid(child, 0)[1] == 0
assert threaded_draws(3) == threaded_draws(1)
"""


def threaded_draws(threads: int) -> list[int]:
    """Tokens drawn from wide rows with so many threads."""
    import torch

    from server.engine.request import SamplingParams
    from server.engine.sampler import RowSampling, sample
    from server.kernels.sampling import SampleKernel

    logits = torch.randn(6, 20_000, generator=torch.Generator().manual_seed(1))
    rows = [RowSampling(SamplingParams(temperature=1.0, top_p=0.9), 3, i) for i in range(6)]
    return [choice.token_id for choice in sample(logits, rows, SampleKernel(load().functions, threads))]


@pytest.mark.processes
def test_one_openmp_runtime_that_survives_a_fork_before_its_first_use(no_choice: None) -> None:
    functions()
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
