"""docker/: the compose files use the package's own commands with options that they have, and publish one port only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).resolve().parent.parent / "docker"


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))["services"]
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_commands_have_the_options_that_are_given(role: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", f"server.{role}", "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"--[a-z-]+", shown.stdout))
    for name in ("compose.yaml", "compose.cuda.yaml"):
        program, *arguments = services(name)[role]["command"]
        assert program == f"launch_{role}"
        assert {argument for argument in arguments if argument.startswith("--")} <= known


def test_only_decode_is_published_and_only_to_this_machine() -> None:
    published = {name: service.get("ports", []) for name, service in services("compose.yaml").items()}
    assert published == {"prefill": [], "decode": ["127.0.0.1:30001:30001"]}


def test_health_checks_ask_the_port_and_name_of_the_command() -> None:
    for role, path in (("prefill", "/health"), ("decode", "/ready")):
        service = services("compose.yaml")[role]
        command = service["command"]
        host, port = command[command.index("--host") + 1], command[command.index("--port") + 1]
        assert host == service["hostname"]
        assert f"http://{host}:{port}{path}" in service["healthcheck"]["test"][-1]


def test_image_runs_as_a_numbered_user_from_the_pinned_versions() -> None:
    lines = (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    assert all("-c constraints.txt" in line for line in lines if "pip install" in line)
