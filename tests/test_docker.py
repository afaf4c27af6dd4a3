"""docker/: commands have options that exist, one port is published, and what has to agree between files does."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.routers import KINDS, Kind

DOCKER = Path(__file__).resolve().parent.parent / "docker"
KUBERNETES = DOCKER / "kubernetes"


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))["services"]
    return found


def objects() -> dict[tuple[str, str], Any]:
    """Everything in docker/kubernetes/ by kind and name."""
    found = {}
    for path in KUBERNETES.glob("*.yaml"):
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if each["kind"] != "Kustomization":
                found[each["kind"], each["metadata"]["name"]] = each
    return found


WORKLOADS = {"prefill": "StatefulSet", "decode": "Deployment", "router": "Deployment"}


def pod(role: str) -> Any:
    """The pod template of a role."""
    return objects()[WORKLOADS[role], role]["spec"]["template"]


def server(role: str) -> Any:
    [container] = pod(role)["spec"]["containers"]
    return container


def value(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def options(arguments: list[str]) -> set[str]:
    return {argument for argument in arguments if argument.startswith("--")}


def help_of(module: str) -> set[str]:
    """The options of a program."""
    shown = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z-]+", shown.stdout))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_commands_have_the_options_that_are_given(role: str) -> None:
    known = help_of(f"server.{role}")
    in_kubernetes = server(role)["command"]
    for command in (
        *(services(name)[role]["command"] for name in ("compose.yaml", "compose.cuda.yaml")),
        in_kubernetes,
    ):
        program, *arguments = command
        assert program == f"launch_{role}"
        assert options(arguments) <= known


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.package)
def test_routers_have_the_options_that_are_given(kind: Kind) -> None:
    if kind.missing:
        pytest.skip(kind.missing)
    given = options(services("compose.router.yaml")["router"]["command"]) | options(server("router")["args"])
    assert given <= help_of(kind.module)


def test_the_router_of_compose_names_nodes_as_the_decode_node_does() -> None:
    command, pair = services("compose.router.yaml")["router"]["command"], services("compose.yaml")
    at = command.index("--prefill")
    url, bootstrap_port = command[at + 1 : at + 3]
    known_as = value(pair["decode"]["command"], "--prefill")
    port = value(pair["prefill"]["command"], "--port")
    assert (url, f"{known_as.split(':')[0]}:{bootstrap_port}") == (f"http://{known_as.split(':')[0]}:{port}", known_as)
    decode = pair["decode"]["command"]
    assert value(command, "--decode") == f"http://{value(decode, '--host')}:{value(decode, '--port')}"
    assert services("compose.router.yaml")["router"]["ports"] == [f"127.0.0.1:{value(command, '--port')}:30002"]


def test_the_router_of_kubernetes_finds_the_nodes() -> None:
    arguments = server("router")["args"]
    for role in ("prefill", "decode"):
        at = arguments.index(f"--{role}-selector")
        wanted = dict(label.split("=") for label in arguments[at + 1 : at + 3])
        assert wanted.items() <= pod(role)["metadata"]["labels"].items()
        assert value(server(role)["command"], "--port") == value(arguments, "--service-discovery-port")
        assert value(server(role)["command"], "--host") == "$(POD_IP)"
    annotation = pod("prefill")["metadata"]["annotations"]["sglang.ai/bootstrap-port"]
    assert annotation == value(server("prefill")["command"], "--bootstrap-port")
    [rule] = objects()["Role", "router"]["rules"]
    assert (rule["resources"], set(rule["verbs"])) == (["pods"], {"get", "list", "watch"})


def test_decode_nodes_of_kubernetes_know_every_prefill_node_by_its_name() -> None:
    prefill = objects()["StatefulSet", "prefill"]["spec"]
    service = objects()["Service", prefill["serviceName"]]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    port = value(server("prefill")["command"], "--bootstrap-port")
    names = [f"prefill-{i}.{prefill['serviceName']}:{port}" for i in range(prefill["replicas"])]
    command = server("decode")["command"]
    assert [word for before, word in pairwise(command) if before == "--prefill"] == names


@pytest.mark.parametrize("role", WORKLOADS)
def test_pods_are_selected_probed_and_restricted(role: str) -> None:
    spec, container = pod(role)["spec"], server(role)
    selected = objects()[WORKLOADS[role], role]["spec"]["selector"]["matchLabels"]
    assert selected == pod(role)["metadata"]["labels"] == objects()["Service", role]["spec"]["selector"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    words = container.get("command") or container["args"]
    assert ports["http"] == int(value(words, "--port"))
    paths = [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "readiness")]
    assert paths == (["/liveness", "/readiness"] if role == "router" else ["/health", "/ready"])
    dockerfile = "Dockerfile.router" if role == "router" else "Dockerfile"
    [user] = re.findall(r"^USER (\d+):", (DOCKER / dockerfile).read_text(encoding="utf-8"), re.MULTILINE)
    assert spec["securityContext"]["runAsUser"] == int(user)
    for each in (*spec.get("initContainers", ()), container):
        assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert each["securityContext"]["readOnlyRootFilesystem"]


def test_only_peers_reach_the_bulk_data() -> None:
    for role, peer in (("prefill", "decode"), ("decode", "prefill")):
        for rule in objects()["NetworkPolicy", role]["spec"]["ingress"]:
            if any("endPort" in port for port in rule["ports"]):
                assert [source["podSelector"]["matchLabels"]["role"] for source in rule["from"]] == [peer]


def test_every_manifest_is_applied() -> None:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))
    assert {*listed["resources"], "kustomization.yaml"} == {path.name for path in KUBERNETES.iterdir()}
    images = {
        each["image"] for role in WORKLOADS for each in (*pod(role)["spec"].get("initContainers", ()), server(role))
    }
    assert {image["name"] for image in listed["images"]} == images


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
    for name in ("Dockerfile", "Dockerfile.router"):
        lines = (DOCKER / name).read_text(encoding="utf-8").splitlines()
        users = [line for line in lines if line.startswith("USER ")]
        assert users == ["USER 10001:10001"]
        assert all(re.search(r"-c \S*constraints.txt", line) for line in lines if "pip install" in line)
