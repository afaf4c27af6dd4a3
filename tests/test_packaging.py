"""What is shipped: a wheel with the assets, pinned dependencies that match the imports, and nothing of one machine."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from server.kernels.build import NoCompiler, Target, build, find_compiler, isas_of_machine, library_path

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "server" / "assets"
pytestmark = pytest.mark.timeout(900)
"""The first of these tests may have to compile the kernels."""
NOT_SHIPPED = {".git", ".venv", ".run", "build", "dist", "__pycache__"}
USED_WITHOUT_IMPORT = {"httptools", "jinja2"}
"""Used by another dependency, which does not ask for it."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def declared(*extras: str) -> set[str]:
    """Names of the dependencies of the package and of ``extras``."""
    lines = list(project()["dependencies"])
    for extra in extras:
        lines += project()["optional-dependencies"][extra]
    return {canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


def pins() -> dict[str, str]:
    """constraints.txt as distribution -> version. Fails on anything but exact versions."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
        assert match, f"not an exact public version: {line!r}"
        found[canonical(match.group(1))] = match.group(2)
    return found


def own_files() -> list[Path]:
    """Every file of the project that is not made by a tool."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = listed.stdout.decode().split("\0")
        return [path for name in names if name and (path := ROOT / name).is_file()]
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not any(p in NOT_SHIPPED or p.endswith(("_cache", ".egg-info")) for p in path.parts)
    ]


def imported(folder: str) -> set[str]:
    """Distributions that the Python files of a folder import."""
    by_module = metadata.packages_distributions()
    ours = {"server", "scripts", "tests"} | {path.stem for path in (ROOT / "scripts").iterdir()}
    names = set()
    for path in (ROOT / folder).rglob("*.py"):
        names |= {name.split(".")[0] for name in absolute_imports(path)}
    unknown = {name for name in names - ours - sys.stdlib_module_names if name not in by_module}
    assert unknown == set(), f"{folder}/ imports modules of no installed distribution: {unknown}"
    return {canonical(by_module[name][0]) for name in names - ours - sys.stdlib_module_names}


def absolute_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the package, with the kernels if there is a compiler."""
    with contextlib.suppress(NoCompiler):
        build()  # they are copied
    return make_wheel(tmp_path_factory.mktemp("build"))


def make_wheel(copy: Path, **env: str) -> zipfile.ZipFile:
    """A wheel built in the folder ``copy``, without the network."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "server", copy / "server", ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            "out",
            ".",
        ],
        cwd=copy,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = (copy / "out").glob("dsv4_pd_server-0.1.0-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_contains_every_module_and_asset(wheel: zipfile.ZipFile) -> None:
    packed = set(wheel.namelist())
    wanted = {path.relative_to(ROOT).as_posix() for path in own_files() if path.is_relative_to(ROOT / "server")}
    assert "server/assets/tiny-dsv4/config.json" in wanted
    assert "server/assets/tiny-gsm8k/test.jsonl" in wanted
    assert any(name.startswith("server/assets/tiny-dsv4/") and name.endswith(".safetensors") for name in wanted)
    assert wanted - packed == set()
    assert {name for name in packed if name.split("/")[0] not in ("server", "dsv4_pd_server-0.1.0.dist-info")} == set()


def test_wheel_has_the_kernels_of_its_platform_and_no_older_ones(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.endswith(".so")}
    tag = Path(wheel.filename or "").stem.split("-", 2)[2]
    try:
        find_compiler()
    except NoCompiler:
        assert (packed, tag) == (set(), "py3-none-any")
    else:
        names = {library_path(Target(isa)).name for isa in isas_of_machine()}
        assert packed == {f"server/kernels/built/{name}" for name in names}
        assert tag == f"py3-none-{sysconfig.get_platform().replace('-', '_')}"


def test_wheel_without_a_compiler_is_for_any_platform(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, CXX="")
    assert Path(wheel.filename or "").name.endswith("-py3-none-any.whl")
    assert [name for name in wheel.namelist() if name.endswith(".so")] == []


@pytest.mark.full
def test_installed_wheel_loads_its_kernels(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "from server.kernels.library import load; print(load().path)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_wheel_is_of_a_few_megabytes(wheel: zipfile.ZipFile) -> None:
    assert sum(entry.compress_size for entry in wheel.infolist()) < 16e6


def test_wheel_has_both_commands_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = "dsv4_pd_server-0.1.0.dist-info"
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    assert "launch_prefill = server.prefill.launch:main" in commands
    assert "launch_decode = server.decode.launch:main" in commands
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


def test_pins_are_the_installed_versions() -> None:
    wrong = {}
    for name, version in pins().items():
        try:
            installed = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue  # the other build of mooncake, or another platform's
        if installed != version:
            wrong[name] = (version, installed)
    assert wrong == {}


def test_every_installed_dependency_is_pinned() -> None:
    waiting, seen = declared("cpu", "cuda", "dev"), set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in requires:
            child = canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0])
            if "extra ==" not in line and child not in seen and is_installed(child):
                waiting.add(child)
    assert seen - set(pins()) == set()


def is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_server_imports_only_what_the_package_depends_on() -> None:
    assert imported("server") - declared("cpu", "cuda", "otlp") == set()


@pytest.mark.parametrize("folder", ["scripts", "tests"])
def test_scripts_and_tests_import_only_what_setup_installs(folder: str) -> None:
    assert imported(folder) - declared("cpu", "cuda", "dev") == set()


def test_every_dependency_is_used() -> None:
    assert declared() - imported("server") - imported("scripts") - USED_WITHOUT_IMPORT == set()


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<![\w.~$}-])/(?:work|root|Users|mnt)/",
        r"(?<![\w.~$}-])/home/(?!server\b)",
        r"\bfile://",
        r"--(?:extra-)?index-url[= ]\"?[^\"${\s]",  # a variable names no place
        r"\+cpu\b",
    ],
)
def test_no_file_names_a_place_of_one_machine(pattern: str) -> None:
    found = []
    for path in own_files():
        if path == Path(__file__).resolve():
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_assets_can_be_read_by_another_user() -> None:
    assert [str(path) for path in ASSETS.rglob("*") if path.is_file() and not path.stat().st_mode & 0o004] == []
