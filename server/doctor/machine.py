"""What is installed: Python packages, system libraries, a compiler, and how many files may be open."""

from __future__ import annotations

import ctypes
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from server.doctor.findings import Finding, error, ok, warning
from server.doctor.plan import NodePlan
from server.kernels.build import NoCompiler, Target, find_compiler, isas_of_machine, library_path
from server.node.checks import check_wheel

DISTRIBUTION = "dsv4-pd-server"
SYSTEM_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""What Mooncake's wheel loads from the system, and Debian's package of it."""
_OTHER_FILES = 512
"""Open files of a node beside its HTTP connections."""


def packages(_plan: NodePlan) -> Iterator[Finding]:
    """Python, and every package that this one depends on, in a version that it takes."""
    subject = "packages"
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield warning(subject, f"{DISTRIBUTION} is not installed, so what it needs is not known: run scripts/setup")
        return
    wrong = []
    requirements = [Requirement(line) for line in lines if "extra ==" not in line]
    for needed in requirements:
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is missing")
            continue
        if not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} is {version}, needed is {needed.specifier}")
    if wrong:
        yield error(subject, f"{'; '.join(wrong)}: run scripts/setup, or pip install {DISTRIBUTION} again")
    else:
        yield ok(subject, f"Python {platform.python_version()} and all {len(requirements)} packages that are needed")


def libraries(plan: NodePlan, load: Callable[[str], object] = ctypes.CDLL) -> Iterator[Finding]:
    """The system libraries of Mooncake; ``load`` raises :class:`OSError` for one that is not there."""
    subject = "libraries"
    if plan.peers is None:
        yield ok(subject, "none are needed with --local-prefill")
        return
    missing = {}
    for library, package in SYSTEM_LIBRARIES.items():
        try:
            load(library)
        except OSError as reason:
            missing[package] = f"{library} ({reason})" if library not in str(reason) else str(reason)
    if missing:
        command = f"apt-get install {' '.join(missing)}"
        yield error(subject, f"Mooncake cannot load {'; '.join(missing.values())}: {command}")
    else:
        yield ok(subject, ", ".join(SYSTEM_LIBRARIES))


def compiler(plan: NodePlan) -> Iterator[Finding]:
    """What would compile the CPU kernels; needed only where they are not built."""
    subject = "compiler"
    built = [isa for isa in isas_of_machine() if library_path(Target(isa)).is_file()]
    try:
        command = find_compiler()
    except NoCompiler as reason:
        if built or plan.options.kernels == "python" or plan.options.device != "cpu":
            yield ok(subject, "none, and none is needed")
        else:
            yield warning(subject, f"{reason}; without one the model in Python runs, many times slower")
        return
    yield ok(subject, f"{shutil.which(command[0])}; kernels are built for {', '.join(built) or 'nothing yet'}")


def open_files(plan: NodePlan) -> Iterator[Finding]:
    """Whether the process may open as many files as its HTTP connections need."""
    subject = "open files"
    needed = plan.options.max_connections + _OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        words = f"{hard} are allowed, {needed} are needed for {plan.options.max_connections} HTTP connections"
        yield warning(subject, f"{words}: raise ulimit -n, or give fewer --max-connections")
    else:
        yield ok(subject, f"{'any number' if hard == resource.RLIM_INFINITY else hard} allowed, {needed} needed")


def mooncake(plan: NodePlan) -> Iterator[Finding]:
    """The installed wheel. Raises :class:`TransportUnavailable` for none, both, or one that is too old, and
    :class:`DeviceUnavailable` for one that cannot move memory of the device.
    """
    if plan.peers is not None:
        wheel = check_wheel(plan.options.device)
        yield ok("mooncake", f"{wheel.name} {wheel.version}")
