"""Loads the library of kernels that this CPU can run.

torch is imported first. It brings its own libgomp under the plain name ``libgomp.so.1``, and the loader gives a library
that asks for this name the copy that is there already: so a process has one OpenMP runtime, one pool of threads, and
needs no libgomp from the system. Loading starts no threads: a process may fork until it first computes with several.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401 - see above: it must be there first

from server.kernels.build import BUILT, Isa, Target, built_before, isas_of_machine, library_path
from server.kernels.errors import KernelsUnavailable

CHOICE_VARIABLE = "DSV4_KERNELS_BUILD"
"""Forces one build by its name (``avx2``, ``avx512-sanitized``): for tests."""
CPU_INFO = Path("/proc/cpuinfo")

_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
NEEDED_FLAGS: dict[Isa, set[str]] = {
    Isa.AVX512: _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    Isa.AVX2: _V3,
    Isa.GENERIC: set(),
}
"""The flags in :data:`CPU_INFO` that the compiler was allowed to use (x86-64-v4 and x86-64-v3)."""


@dataclass(frozen=True)
class Library:
    """A loaded library. ``functions`` has what ``src/kernels.h`` declares, without argument types."""

    target: Target
    path: Path
    functions: ctypes.CDLL


def load(target: Target | None = None, *, folder: Path = BUILT) -> Library:
    """The library for this CPU, or the one that is asked for by ``target`` or :data:`CHOICE_VARIABLE`.

    :raises KernelsUnavailable: it is not built, was built from other sources, this CPU cannot run it, or it does not
        load.
    """
    return _load(target or forced_target() or Target(_best_isa(cpu_flags())), folder)


def cpu_flags(path: Path = CPU_INFO) -> frozenset[str]:
    """What the CPU can do, in the kernel's words. Empty where the kernel does not say (x86 only)."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def _best_isa(flags: frozenset[str]) -> Isa:
    for isa in isas_of_machine():
        if NEEDED_FLAGS[isa] <= flags:
            return isa
    lacking = ", ".join(sorted(NEEDED_FLAGS[isas_of_machine()[-1]] - flags))
    raise KernelsUnavailable(f"the kernels need a CPU with AVX2 and FMA: this one has no {lacking}")


def forced_target() -> Target | None:
    """What :data:`CHOICE_VARIABLE` asks for. Raises :class:`KernelsUnavailable` if it names no build."""
    name = os.environ.get(CHOICE_VARIABLE)
    if not name:
        return None
    known = {target.name: target for isa in Isa for target in (Target(isa), Target(isa, sanitized=True))}
    if name not in known:
        raise KernelsUnavailable(f"{CHOICE_VARIABLE}={name} names no build; there are {', '.join(known)}")
    return known[name]


@functools.cache
def _load(target: Target, folder: Path) -> Library:
    if lacking := NEEDED_FLAGS[target.isa] - cpu_flags():
        raise KernelsUnavailable(f"this CPU cannot run the {target.name} kernels: no {', '.join(sorted(lacking))}")
    path = library_path(target, folder=folder)
    if not path.is_file():
        state = "were built from other sources" if built_before(target, folder) else "are not built"
        options = f" --isa {target.isa}" + (" --sanitize" if target.sanitized else "")
        raise KernelsUnavailable(
            f"the {target.name} kernels {state}: run python -m server.kernels.build{options} (it needs g++)"
        )
    try:
        return Library(target, path, ctypes.CDLL(str(path)))
    except OSError as error:
        raise KernelsUnavailable(f"the {target.name} kernels do not load: {error}") from error
