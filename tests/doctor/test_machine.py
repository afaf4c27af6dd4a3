"""Packages, libraries, a compiler and open files, each found missing."""

from __future__ import annotations

import resource
from importlib import metadata

import pytest

from server.doctor import machine
from server.doctor.examination import Check, run_check
from server.doctor.findings import Level
from tests.doctor.support import levels, only_error, plan_of


def test_a_missing_library_names_its_package() -> None:
    def load(name: str) -> None:
        if name == "libnuma.so.1":
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    words = only_error(list(machine.libraries(plan_of(), load)))
    assert words.startswith("Mooncake cannot load libnuma.so.1: cannot open shared object file")
    assert words.endswith("apt-get install libnuma1")


def test_a_node_without_peers_needs_no_libraries() -> None:
    def load(name: str) -> None:
        raise OSError(name)

    assert levels(list(machine.libraries(plan_of(peers=None, local_prefill=True), load))) == [Level.OK]


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["no-such-package", "numpy>=99", "pyzmq", 'ruff; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda _name: lines)
    words = only_error(list(machine.packages(plan_of())))
    assert words.startswith(f"no-such-package is missing; numpy is {metadata.version('numpy')}, needed is >=99:")


def test_no_compiler_is_a_warning_only_where_the_kernels_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(machine, "isas_of_machine", lambda: ())
    (finding,) = machine.compiler(plan_of())
    assert finding.level is Level.WARNING
    assert "CXX is empty" in finding.words
    assert levels(list(machine.compiler(plan_of(kernels="python")))) == [Level.OK]


def test_more_connections_than_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    (finding,) = machine.open_files(plan_of(max_connections=1024))
    assert finding.level is Level.WARNING
    assert finding.words.startswith("1024 are allowed, 1536 are needed for 1024 HTTP connections: raise ulimit -n")


def test_no_mooncake_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    words = only_error(run_check(Check("mooncake", machine.mooncake), plan_of()))
    assert words.startswith("Mooncake is not installed: pip install")
