"""The routers find nodes in Kubernetes as docker/kubernetes/ has it: by labels, annotation and addresses of pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster, Node, free_ports, until

from server.transfer.addresses import split_address
from tests.support.examples import QUESTION, RIGHT_ANSWER
from tests.support.kubernetes import NAMESPACE, PodApi
from tests.support.processes import DRAIN_S, END_S
from tests.support.routers import KINDS, Router

MANIFESTS = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
WITHIN_S = 60.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def template(role: str) -> Any:
    """The pod template of a role."""
    objects = yaml.safe_load_all((MANIFESTS / f"{role}.yaml").read_text(encoding="utf-8"))
    return next(each["spec"]["template"] for each in objects if each["kind"] in ("Deployment", "StatefulSet"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Node]]:
    """Two of each role by their pods' names, all with the same ports on addresses of their own."""
    folder = tmp_path_factory.mktemp("pods")
    port, bootstrap_port = free_ports(2)
    ports: dict[str, Any] = {"port": port, "bootstrap_port": bootstrap_port}
    names = [f"127.1{i}:{bootstrap_port}" for i in range(2)]
    """What ends in a resolver, as the name of a pod does: not spelt as the address."""
    peers = [word for name in names for word in ("--prefill", name)]
    found = {}
    for i in range(2):
        log = folder / f"p{i}.log"
        found[f"prefill-{i}"] = Node("prefill", log, "--insecure", "--slots", "4", host=f"127.0.0.1{i}", **ports)
        log = folder / f"d{i}.log"
        found[f"decode-{i}"] = Node("decode", log, *peers, "--insecure", host=f"127.0.0.2{i}", port=port)
    cluster = Cluster(list(found.values()))
    try:
        cluster.start()
        cluster.wait_ready()
        for i in range(2):
            wait_registered(found[f"decode-{i}"], 2)
        yield found
    finally:
        cluster.stop(END_S, DRAIN_S)


def wait_registered(node: Node, n_peers: int) -> None:
    """Until a decode node can use so many prefill nodes."""
    states = ["registered"] * n_peers
    until(lambda: [peer["state"] for peer in node.info()["peers"]] == states, WITHIN_S, f"{node.name} has its peers")


def pod_of(node: Node) -> Any:
    """Its pod template, with this test's port where the manifest has another."""
    pod = template(node.role)
    for name in pod["metadata"].get("annotations", ()):
        pod["metadata"]["annotations"][name] = node.address.rpartition(":")[2]
    return pod


def arguments_of_the_manifest(port: int) -> list[str]:
    """Those that are about discovery; the port is that of this test's nodes."""
    [container] = template("router")["spec"]["containers"]
    words = [word.replace("$(POD_NAMESPACE)", NAMESPACE) for word in container["args"]]
    words = words[words.index("--service-discovery") : words.index("--host")]
    words[words.index("--service-discovery-port") + 1] = str(port)
    return words


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.package)
def test_pods_are_found_used_and_forgotten(kind: Any, nodes: dict[str, Node], tmp_path: Path) -> None:
    if kind.missing:
        pytest.skip(kind.missing)
    with PodApi(tmp_path / "config").served() as api:
        for name, node in nodes.items():
            host, port = split_address(node.url.removeprefix("http://"))
            api.add(name, pod_of(node), host)
        router = Router(kind, tmp_path / "router.log", [], *arguments_of_the_manifest(port))
        with router.running(n_workers=len(nodes), KUBECONFIG=str(api.config)):
            assert {worker["url"]: worker["worker_type"] for worker in router.workers()} == {
                node.url: node.role for node in nodes.values()
            }
            prefilled = set()
            for _ in range(6):
                body = {"model": "tiny-dsv4", "prompt": QUESTION, "max_tokens": 16, "temperature": 0, "stop": ["\n"]}
                answer = router.http.post("/v1/completions", json=body).raise_for_status().json()
                assert answer["choices"][0]["text"] == RIGHT_ANSWER, answer
                prefilled.add(answer["pd"]["prefill"])
            assert len(prefilled) == 2
            api.remove("decode-1")
            until(lambda: nodes["decode-1"].url not in router.healthy(), WITHIN_S, "the router forgets a pod that ends")
