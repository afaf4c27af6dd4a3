"""Ports, keys, addresses and peers, each wrong once."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from server.doctor import network
from server.doctor.examination import Check, run_check
from server.doctor.findings import Finding, Level
from server.doctor.plan import NodePlan, Port
from tests.doctor.support import levels, only_error, plan_of


def found_by(find: Callable[[NodePlan], Iterable[Finding]], plan: NodePlan) -> list[Finding]:
    return run_check(Check("it", find, 30.0), plan)


def test_a_taken_port_is_named_and_a_free_one_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        plan = plan_of(ports=(Port("--port", number),))
        assert f"--port {number} is in use on 127.0.0.1 by this node itself" in only_error(
            found_by(network.ports, plan)
        )
    assert levels(found_by(network.ports, plan)) == [Level.OK]
    assert levels(found_by(network.ports, plan)) == [Level.OK]


def test_one_number_for_two_ports_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    plan = plan_of(ports=(Port("--port", number), Port("--bootstrap-port", number)))
    assert f"--bootstrap-port {number} is in use" in only_error(found_by(network.ports, plan))


def test_a_key_file_that_others_can_read_is_an_error(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(0o644)
    assert f"chmod 600 {key}" in only_error(found_by(network.keys, plan_of(auth_key_file=key)))
    key.chmod(0o600)
    assert levels(found_by(network.keys, plan_of(auth_key_file=key))) == [Level.OK, Level.OK]


def test_a_peer_of_another_machine_needs_a_key() -> None:
    plan = plan_of(peers=("10.0.0.9:8998",))
    assert "prefill 10.0.0.9:8998 is not on this machine" in only_error(found_by(network.keys, plan))


def test_an_insecure_node_is_a_warning() -> None:
    assert found_by(network.keys, plan_of(insecure=True))[0].level is Level.WARNING


def test_addresses_of_two_kinds_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "are an IPv4 and an IPv6 address" in only_error(found_by(network.addresses, plan_of(peers=("[::1]:8998",))))
    monkeypatch.setenv("MC_USE_IPV6", "1")
    assert "MC_USE_IPV6 is set" in only_error(found_by(network.addresses, plan_of()))


def test_an_ipv6_address_of_another_machine_is_an_error() -> None:
    plan = plan_of(host="2001:db8::1")
    assert "2001:db8::1 cannot be used" in only_error(found_by(network.addresses, plan))


def test_a_wrong_deadline_is_named() -> None:
    assert "no phase 'x'" in only_error(found_by(network.options, plan_of(deadlines=("x=1",))))


def test_injected_faults_are_a_warning() -> None:
    plan = replace(plan_of(faults=("drop:swa",)), role="prefill")
    assert levels(found_by(network.options, plan)) == [Level.WARNING]


def test_a_peer_that_is_not_there_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    (finding,) = found_by(network.peers, plan_of(peers=(address,)))
    assert finding.level is Level.WARNING
    assert f"nobody listens at {address}" in finding.words


def test_a_peer_that_is_no_prefill_node_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=_answer_in_http, args=(listener,), daemon=True).start()
        words = only_error(found_by(network.peers, plan_of(peers=(address,))))
    assert words == f"{address} is not the bootstrap port of a prefill node: it does not speak ZMQ"


def _answer_in_http(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                connection.recv(64)
