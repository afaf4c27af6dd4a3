"""Two real processes with a shared key: served with it, refused without it, and the client is told why."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import Node, Pair, until

from server.doctor import network
from server.doctor.findings import Finding, Level
from tests.doctor.support import plan_of
from tests.support.processes import process_pair, running_node
from tests.support.raw_http import RawConnection, head

API_KEY = "sk-of-the-test"
KNOWN_S = 5.0
"""From the moment that the decode node answers at all until it knows that its key is wrong."""


def key_file(directory: Path, name: str, secret: str) -> str:
    path = directory / name
    path.write_text(secret)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("auth")
    key = ("--auth-key-file", key_file(directory, "pd.key", "k" * 64))
    with process_pair(directory, key, (*key, "--api-key-file", key_file(directory, "api.key", API_KEY))) as pair:
        yield pair


def complete(url: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": [20, 30, 40], "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)


def test_the_pair_serves_whoever_has_the_api_key(pair: Pair) -> None:
    assert complete(pair.d.url).status_code == 401
    answer = complete(pair.d.url, API_KEY)
    assert answer.status_code == 200
    assert answer.headers["x-pd-prefill"] == pair.address
    assert pair.d.http.get("/server_info").status_code == 401
    assert pair.p.info()["control_plane_takes"] == "key"


def test_the_doctor_knows_whether_a_prefill_node_takes_the_key(pair: Pair, tmp_path: Path) -> None:
    def look(key: str | None) -> Finding:
        file = None if key is None else Path(key_file(tmp_path, "key", key))
        (finding,) = network.peers(plan_of(peers=(pair.address,), auth_key_file=file))
        return finding

    assert look("k" * 64) == Finding(Level.OK, "peer", f"prefill {pair.address} takes the connection")
    assert look("other" * 20).words == f"prefill {pair.address} has another key: the two --auth-key-file differ"
    without = look(None)
    assert without.level is Level.ERROR
    assert f"prefill {pair.address} wants a key" in without.words


def test_the_limits_of_http_hold_before_the_key(pair: Pair) -> None:
    for node in (pair.p, pair.d):
        with RawConnection(node.url) as connection:
            connection.send(b"GET /server_info HTTP/1.1\r\n")
            assert connection.send_until_refused(b"a: b\r\n" * 10_000, 100 << 20) < 50 << 20
        assert node.metrics()["pd_http_refused_total{reason=headers_too_large}"] == 1


def test_large_bodies_do_not_keep_out_small_requests(pair: Pair) -> None:
    large = head("POST", "/v1/completions", Authorization=f"Bearer {API_KEY}", Content_Length=(7 << 20) + 1)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            connection = stack.enter_context(RawConnection(pair.d.url)).send(large)
            connection.send_until_refused(bytes(1 << 16), 7 << 20)
        assert complete(pair.d.url, API_KEY).status_code == 200
        metrics = pair.d.metrics()
        assert metrics["pd_http_held_body_bytes"] <= 64 << 20
        assert metrics["pd_http_refused_total{reason=too_many_bodies}"] >= 2
    until(lambda: pair.d.metrics()["pd_http_held_body_bytes"] == 0, 20, "the bodies are gone")


@pytest.mark.parametrize(
    ("secret", "words"), [("x" * 64, "has another key"), (None, "wants a key")], ids=["another key", "no key"]
)
def test_a_decode_node_without_the_key_tells_its_clients(
    pair: Pair, tmp_path: Path, secret: str | None, words: str
) -> None:
    key = () if secret is None else ("--auth-key-file", key_file(tmp_path, "other.key", secret))
    with running_node(Node("decode", tmp_path / "log", "--prefill", pair.address, *key)) as stranger:
        stranger.wait_for("/health")
        started = time.monotonic()
        until(lambda: stranger.info()["peers"][0]["state"] == "refused", KNOWN_S, "the peer is refused")
        answer = complete(stranger.url)
        assert time.monotonic() - started < KNOWN_S
        assert answer.status_code == 503
        assert words in answer.json()["error"]["message"]
        assert complete(pair.d.url, API_KEY).status_code == 200
        reasons = [name for name in pair.p.metrics() if name.startswith("pd_control_handshakes_refused_total")]
        assert reasons


def test_the_log_says_what_the_data_plane_does_not_protect_and_which_ports_are_open(pair: Pair) -> None:
    for node in (pair.p, pair.d):
        log = node.log.read_text()
        assert "the data plane is not protected" in log
        (ports, *_) = re.findall(r"ports open on all interfaces: \[(.+?)\]", log)
        assert all(15000 <= int(port) <= 17000 for port in ports.split(", "))
        assert len(ports.split(", ")) >= 2, "Mooncake has two"
