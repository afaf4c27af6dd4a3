"""Imports go one way: the packages of server/ may use each other only along these arrows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ANYTHING = ("server",)
SHARED_BY_THE_ROLES = (
    "server.node",
    "server.engine",
    "server.transfer",
    "server.cache",
    "server.failure",
    "server.faults",
    "server.sizes",
    "server.telemetry",
    "server.threads",
)
ARROWS: dict[str, tuple[str, ...]] = {
    "server.model": ("server.model", "server.cache"),
    "server.kernels": ("server.kernels", "server.model", "server.cache", "server.memory"),
    "server.cache": ("server.cache", "server.failure", "server.sizes"),
    "server.engine": ("server.engine", "server.model", "server.kernels.sampling", "server.cache", "server.failure"),
    "server.transfer": ("server.transfer", "server.cache", "server.failure", "server.memory"),
    "server.faults": ("server.faults", "server.transfer", "server.cache"),
    "server.chat": ("server.chat", "server.engine.request", "server.engine.grammar", "server.failure"),
    "server.telemetry": ("server.telemetry", "server.transfer", "server.cache", "server.failure"),
    "server.api": (
        "server.api",
        "server.chat",
        "server.engine.grammar",
        "server.engine.request",
        "server.engine.prompt_logprobs",
        "server.engine.detokenizer",
        "server.engine.tokenizer_process",
        "server.failure",
        "server.memory",
        "server.threads",
    ),
    "server.node": ("server.node", *SHARED_BY_THE_ROLES),
    "server.doctor": (
        "server.doctor",
        "server.node",
        "server.chat",
        "server.engine",
        "server.kernels",
        "server.model",
        "server.transfer",
        "server.cache",
        "server.faults.spec",
        "server.sizes",
    ),
    "server.prefill": ("server.prefill", *SHARED_BY_THE_ROLES),
    "server.decode": ("server.decode", *SHARED_BY_THE_ROLES),
}
"""What each package may import of ours. Plain modules of server/ may import nothing of ours but ``server`` itself."""

LAUNCHERS = (
    "server.node.build",
    "server.node.checks",
    "server.node.memory_plan",
    "server.node.run",
    "server.node.serve",
    "server.prefill.launch",
    "server.prefill.start",
    "server.prefill.__main__",
    "server.decode.launch",
    "server.decode.start",
    "server.decode.__main__",
)
"""They wire a process up: anything but another role."""

ROLES = ("server.prefill", "server.decode")

OWNERS: dict[str, tuple[str, ...]] = {
    "mooncake": ("server.transfer.engines",),
    "zmq": ("server.transfer", "server.prefill", "server.decode"),
    "deepseek_recipe": ("server.chat",),
    "fastapi": ("server.api",),
    "starlette": ("server.api",),
    "uvicorn": ("server.api", "server.prefill", "server.decode"),
    "prometheus_client": ("server.api", "server.transfer", "server.telemetry", "server.prefill", "server.decode"),
    "opentelemetry": ("server.telemetry",),
}
"""Which of our packages may import a third-party one (launchers may import any)."""

FAULTS_KNOWN_TO = {
    "server.node.build": {"server.faults.hooks", "server.faults.injection", "server.faults.spec"},
    "server.node.run": {"server.faults.spec"},
    "server.doctor.network": {"server.faults.spec"},
    "server.node.context": {"server.faults.hooks"},
    "server.prefill.bootstrap_socket": {"server.faults.hooks"},
    "server.prefill.request": {"server.faults.hooks"},
}
"""Who imports what of ``server.faults``: the options' reader, and the hooks' callers for their types."""

SOCKETS = ("asyncio", "fastapi", "http", "httpx", "mooncake", "requests", "socket", "starlette", "uvicorn", "zmq")
WITHOUT_SOCKETS = ("server.model", "server.kernels", "server.cache")
"""Packages that may not import :data:`SOCKETS`, nor anything of ours that does."""


@dataclass(frozen=True)
class Import:
    """One import statement: ``module`` imports ``target`` (a module, or a name in one) on ``line``."""

    module: str
    target: str
    line: int


def modules(root: Path) -> dict[str, Path]:
    """Every module of server/ by dotted name."""
    found = {}
    for path in sorted((root / "server").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Every import of a module, wherever it stands (in functions and TYPE_CHECKING blocks too)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield Import(module, name if name in known else base, node.lineno)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def allowed(module: str) -> tuple[str, ...]:
    """What ``module`` may import of ours."""
    if module in LAUNCHERS:
        return ANYTHING
    package = ".".join(module.split(".")[:2])
    return ARROWS.get(package, ())


def violations(root: Path) -> list[str]:
    """Every import of server/ under ``root`` against an arrow, as ``module:line imports target``."""
    known = modules(root)
    graph = {module: list(imports(module, path, known)) for module, path in known.items()}
    found = []
    for module, statements in graph.items():
        for statement in statements:
            other_roles = tuple(role for role in ROLES if not within(module, (role,)))
            ours = within(statement.target, ANYTHING) and statement.target != "server"
            wrong_arrow = ours and not within(statement.target, allowed(module))
            wrong_role = module in LAUNCHERS and within(statement.target, other_roles)
            owners = OWNERS.get(statement.target.split(".")[0])
            not_owner = owners is not None and module not in LAUNCHERS and not within(module, owners)
            if wrong_arrow or wrong_role or not_owner:
                found.append(f"{module}:{statement.line} imports {statement.target}")
    found += socket_paths(graph)
    return found


def socket_paths(graph: dict[str, list[Import]]) -> list[str]:
    """Chains of imports from a package of :data:`WITHOUT_SOCKETS` to a socket module, through any module of ours."""
    found = []
    for start in graph:
        if not within(start, WITHOUT_SOCKETS):
            continue
        waiting, seen = [(start, start)], {start}
        while waiting:
            module, chain = waiting.pop()
            for statement in graph.get(module, []):
                if within(statement.target, SOCKETS):
                    found.append(f"{chain} -> {statement.target}")
                elif statement.target in graph and statement.target not in seen:
                    seen.add(statement.target)
                    waiting.append((statement.target, f"{chain} -> {statement.target}"))
    return found


def circle(root: Path) -> list[str]:
    """Modules of server/ under ``root`` that import each other in a circle, the first one again at the end."""
    known = modules(root)
    graph = {
        module: sorted({each.target for each in imports(module, path, known) if each.target in known})
        for module, path in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]  # it goes from the imported to the importing one
    return []


def test_imports_go_one_way() -> None:
    assert violations(ROOT) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions and TYPE_CHECKING blocks count: none of them is there to hide a circle."""
    assert circle(ROOT) == []


def test_every_package_has_its_arrows() -> None:
    packages = {".".join(name.split(".")[:2]) for name, path in modules(ROOT).items() if path.parent != ROOT / "server"}
    assert packages <= set(ARROWS)


def test_only_the_hook_points_know_of_faults() -> None:
    found: dict[str, set[str]] = {}
    for module, path in (known := modules(ROOT)).items():
        targets = {each.target for each in imports(module, path, known) if within(each.target, ("server.faults",))}
        if targets and not within(module, ("server.faults",)):
            found[module] = targets
    assert found == FAULTS_KNOWN_TO


@pytest.mark.parametrize("package", WITHOUT_SOCKETS)
def test_model_and_cache_load_without_the_network_stack(package: str) -> None:
    names = sorted(name for name in modules(ROOT) if within(name, (package,)))
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*sorted({{m.split(".")[0] for m in sys.modules}} & {{"fastapi", "mooncake", "uvicorn", "zmq"}}))
print(*sorted(m for m in sys.modules if m.startswith(("server.api", "server.transfer", "server.engine"))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("module", "statement", "reported"),
    [
        (
            "server/model/network.py",
            "from server.engine import request",
            "server.model.network:1 imports server.engine",
        ),
        ("server/model/network.py", "import socket", "server.model.network -> socket"),
        ("server/cache/arena.py", "def f():\n    from server.model import network", "server.cache.arena:2 imports"),
        (
            "server/cache/arena.py",
            "from ..transfer.rooms import x",
            "server.cache.arena:1 imports server.transfer.rooms",
        ),
        ("server/engine/engine.py", "import server.transfer.rooms", "server.engine.engine:1 imports server.transfer"),
        ("server/transfer/rooms.py", "import server.engine.request", "server.transfer.rooms:1 imports server.engine"),
        ("server/transfer/rooms.py", "from server import prefill", "server.transfer.rooms:1 imports server.prefill"),
        ("server/transfer/rooms.py", "from server import decode", "server.transfer.rooms:1 imports server.decode"),
        (
            "server/api/routes.py",
            "from server.engine import engine",
            "server.api.routes:1 imports server.engine.engine",
        ),
        ("server/api/routes.py", "import zmq.asyncio", "server.api.routes:1 imports zmq.asyncio"),
        ("server/decode/node.py", "from server import prefill", "server.decode.node:1 imports server.prefill"),
        ("server/decode/launch.py", "import server.prefill", "server.decode.launch:1 imports server.prefill"),
        ("server/decode/node.py", "import server.api.app", "server.decode.node:1 imports server.api.app"),
        ("server/transfer/rooms.py", "import mooncake.engine", "server.transfer.rooms:1 imports mooncake.engine"),
        ("server/node/options.py", "import server.model", "server.node.options:1 imports server.model"),
        ("server/node/build.py", "import server.decode", "server.node.build:1 imports server.decode"),
        ("server/transfer/rooms.py", "import server.node.build", "server.transfer.rooms:1 imports server.node.build"),
    ],
)
def test_a_wrong_import_is_reported(tmp_path: Path, module: str, statement: str, reported: str) -> None:
    tree(tmp_path, {module: statement})
    assert any(line.startswith(reported) for line in violations(tmp_path)), violations(tmp_path)


def test_right_imports_are_not_reported(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "server/model/network.py": "import torch\nfrom server.cache import specs",
            "server/api/routes.py": "import fastapi\nfrom server.engine.request import Backend\nfrom .app import x",
            "server/decode/launch.py": "import uvicorn, zmq\nimport server.api.app, server.engine.engine",
            "server/node/build.py": "import server.api.app, server.transfer.rooms, server.cache.specs",
            "server/node/options.py": "from server import __version__",
            "server/decode/node.py": "from server.transfer import rooms\nfrom server.engine import engine",
            "server/transfer/engines/mooncake.py": "import mooncake.engine",
        },
    )
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("back", "reported"),
    [
        ("import server.cache.arena", {"server.cache.arena", "server.cache.specs"}),
        ("def f():\n    from . import arena", {"server.cache.arena", "server.cache.specs"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from server.cache.arena import Arena",
         {"server.cache.arena", "server.cache.specs"}),
        ("import server.cache.layout", {"server.cache.arena", "server.cache.specs", "server.cache.layout"}),
        ("import server.cache.specs", {"server.cache.specs"}),
    ],
    ids=["module", "function", "types", "over a third module", "itself"],
)  # fmt: skip
def test_a_circle_of_imports_is_reported(tmp_path: Path, back: str, reported: set[str]) -> None:
    arena, layout = "from server.cache import specs", "from server.cache.arena import Arena"
    tree(tmp_path, {"server/cache/arena.py": arena, "server/cache/layout.py": layout, "server/cache/specs.py": back})
    found = circle(tmp_path)
    assert found[0] == found[-1]
    assert set(found) == reported


def test_a_socket_behind_another_module_is_found(tmp_path: Path) -> None:
    tree(tmp_path, {"server/model/network.py": "from server.cache import specs", "server/cache/specs.py": "import zmq"})
    assert "server.model.network -> server.cache.specs -> zmq" in violations(tmp_path)


def calls_into_the_shared_pool(root: Path) -> list[str]:
    """Every call in server/ under ``root`` that would wait in asyncio's own pool, as ``module:line``."""
    found = []
    for module, path in modules(root).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0] if node.args else None
            without_pool = name == "run_in_executor" and isinstance(first, ast.Constant) and first.value is None
            if name == "to_thread" or without_pool:
                found.append(f"{module}:{node.lineno} calls {name}")
    return found


def test_nothing_waits_in_the_pool_that_everything_shares() -> None:
    assert calls_into_the_shared_pool(ROOT) == []


@pytest.mark.parametrize("code", ["asyncio.to_thread(f)", "to_thread(f)", "loop.run_in_executor(None, f)"])
def test_a_call_into_the_shared_pool_is_reported(tmp_path: Path, code: str) -> None:
    tree(tmp_path, {"server/api/routes.py": f"async def g(loop, f):\n    await {code}"})
    [line] = calls_into_the_shared_pool(tmp_path)
    assert line.startswith("server.api.routes:2 ")


def tree(root: Path, files: dict[str, str]) -> None:
    """A server/ with the packages that the cases name, and ``files`` over it."""
    plain = [
        "__init__",
        "launch",
        "api/app",
        "cache/specs",
        "engine/engine",
        "engine/request",
        "prefill/node",
        "transfer/rooms",
    ]
    for name in [f"server/{stem}.py" for stem in plain] + [
        "server/prefill/__init__.py",
        "server/decode/__init__.py",
        *files,
    ]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""), encoding="utf-8")
