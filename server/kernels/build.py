"""Compiles ``src/*.cpp`` into one shared library for each instruction set that a machine of this kind may have.

    python -m server.kernels.build [--sanitize] [--isa NAME ...]

On x86-64 these are AVX-512 and AVX2; ``library`` picks by the CPU that it runs on. Elsewhere there is a generic one.
The name of a library carries a hash of the sources and flags: one that was built from other sources is never loaded,
and processes may build at the same time. Needs nothing but the standard library, so that ``setup.py`` can use it.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
BUILT = HERE / "built"
COMPILE_TIMEOUT_S = 900.0

COMMON_FLAGS = (
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a multiplication and an addition are fused where the source says so, and nowhere else
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
FAST_FLAGS = ("-O3", "-Wl,-z,defs")
SANITIZER_FLAGS = ("-O0", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class Isa(enum.StrEnum):
    """An instruction set that a library is compiled for."""

    AVX512 = "avx512"
    AVX2 = "avx2"
    GENERIC = "generic"
    """Whatever every machine of this kind has: slow on x86-64, where it is for tests."""


ISA_FLAGS: dict[Isa, tuple[str, ...]] = {
    Isa.AVX512: ("-march=x86-64-v4",),
    Isa.AVX2: ("-march=x86-64-v3",),
    Isa.GENERIC: (),
}


class BuildFailed(RuntimeError):
    """The kernels could not be compiled; the text ends with what the compiler said."""


class NoCompiler(BuildFailed):
    """There is no C++ compiler here, or ``CXX`` is empty: none is wanted."""


@dataclass(frozen=True)
class Target:
    """One library: its instruction set, and whether memory errors and undefined behaviour end the process."""

    isa: Isa
    sanitized: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        return (*COMMON_FLAGS, *(SANITIZER_FLAGS if self.sanitized else FAST_FLAGS), *ISA_FLAGS[self.isa])

    @property
    def name(self) -> str:
        return f"{self.isa}-sanitized" if self.sanitized else str(self.isa)


def isas_of_machine(machine: str = "") -> tuple[Isa, ...]:
    """What is built for a machine of this kind (default: this one), the fastest first."""
    return (Isa.AVX512, Isa.AVX2) if (machine or platform.machine()) in ("x86_64", "AMD64") else (Isa.GENERIC,)


def library_path(target: Target, *, sources: Path = SOURCES, folder: Path = BUILT) -> Path:
    """Where the library of the present ``sources`` lies, built or not."""
    return folder / f"kernels-{target.name}-{source_digest(target.flags, sources)}.so"


def source_digest(flags: Sequence[str] = (*COMMON_FLAGS, *FAST_FLAGS), sources: Path = SOURCES) -> str:
    """16 hex digits of the sources and of ``flags``; the default is what libraries of all instruction sets share."""
    digest = hashlib.blake2b(" ".join(flags).encode(), digest_size=8)
    for path in sorted(sources.iterdir()):
        if path.suffix in (".h", ".cpp"):
            content = path.read_bytes()
            digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def built_before(target: Target, folder: Path = BUILT) -> list[Path]:
    """The libraries of ``target`` that are there, of whatever sources."""
    return sorted(folder.glob(f"kernels-{target.name}-{'[0-9a-f]' * 16}.so"))


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``CXX``, else g++. Raises :class:`NoCompiler`."""
    named = os.environ.get("CXX")
    command = shlex.split(named) if named is not None else ["g++"]
    if not command:
        raise NoCompiler("CXX is empty: no kernels are built")
    if shutil.which(command[0]) is None:
        raise NoCompiler(f"no C++ compiler: {command[0]} is not installed (Debian: apt-get install g++, or set CXX)")
    return command


def build(targets: Sequence[Target] = (), *, sources: Path = SOURCES, folder: Path = BUILT) -> list[Path]:
    """Builds what is not built yet of ``targets`` (default: all that this machine needs) and returns their paths.

    :raises BuildFailed: there is no compiler, it fails, or it takes longer than :data:`COMPILE_TIMEOUT_S`.
    """
    targets = targets or [Target(isa) for isa in isas_of_machine()]
    paths = [library_path(target, sources=sources, folder=folder) for target in targets]
    missing = [(target, path) for target, path in zip(targets, paths, strict=True) if not path.is_file()]
    if missing:
        compiler = find_compiler()
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
            for done in [pool.submit(_compile, compiler, *each, sources) for each in missing]:
                done.result()
    return paths


def _compile(compiler: Sequence[str], target: Target, path: Path, sources: Path) -> None:
    """Compiles into a file of its own and then renames it: nobody ever sees half a library."""
    files = sorted(sources.glob("*.cpp"))
    if not files:
        raise BuildFailed(f"there are no kernels to build: {sources} has no .cpp file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        _run([*compiler, *target.flags, *map(str, files), "-o", made], target)
        Path(made).chmod(0o755)
        Path(made).replace(path)
    finally:
        Path(made).unlink(missing_ok=True)
    for other in built_before(target, path.parent):
        if other.name != path.name:
            other.unlink(missing_ok=True)


def _run(command: Sequence[str], target: Target) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"the kernels for {target.name} were not compiled: {error}") from error
    if done.returncode:
        raise BuildFailed(
            f"the kernels for {target.name} do not compile: {shlex.join(command)} ended with {done.returncode}\n"
            + done.stderr[-4000:]
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 built, or there is no compiler (which is said), 1 the compiler failed."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m server.kernels.build", description="Compiles the CPU kernels."
    )
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined behaviour sanitizers")
    parser.add_argument("--isa", action="append", type=Isa, choices=list(Isa), help="only this one; may be repeated")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="another folder of sources")
    parser.add_argument("--folder", type=Path, default=BUILT, help="where the libraries go")
    args = parser.parse_args(argv)
    targets = [Target(isa, args.sanitize) for isa in args.isa or isas_of_machine()]
    paths = [library_path(target, sources=args.sources, folder=args.folder) for target in targets]
    if missing := [str(path) for path in paths if not path.is_file()]:
        sys.stderr.write(f"compiling the CPU kernels: {' '.join(missing)}\n")
    try:
        build(targets, sources=args.sources, folder=args.folder)
    except NoCompiler as error:
        sys.stderr.write(f"{error}. The model in Python will run instead: it is slower.\n")
    except BuildFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
