"""What surrounds the process of a node: closed streams, a log that nobody reads, a terminal that hangs up."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from cluster import Node, free_port, until

from tests.e2e.test_processes import Stream
from tests.support.processes import SLOW_MODEL, running_node

ENDS_S = 60.0
PROMPT = [20, 30, 40]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_without_standard_streams_serves_and_ends_when_its_terminal_does(tmp_path: Path, role: str) -> None:
    options = () if role == "prefill" else ("--prefill", f"127.0.0.1:{free_port()}")
    wrapper = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    with running_node(Node(role, tmp_path / "log", *options), wrapper) as node:
        node.wait_for("/health")
        assert node.metrics()
        node.signal(signal.SIGHUP)
        assert node.wait_ended(ENDS_S) == 0


def test_nohup_is_respected(tmp_path: Path) -> None:
    with running_node(Node("decode", tmp_path / "log", "--local-prefill"), ("nohup",)) as node:
        node.wait_for("/health")
        status = Path(f"/proc/{node.pid}/status").read_text()
        ignored = int(re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)[0], 16)
        assert ignored & 1 << (signal.SIGHUP - 1)


def test_a_node_that_is_told_to_end_while_it_loads_ends_without_a_traceback(tmp_path: Path) -> None:
    with running_node(Node("decode", tmp_path / "log", "--local-prefill")) as node:
        until(lambda: is_listening(node.port), ENDS_S, "it has its port")
        node.signal(signal.SIGINT)
        assert node.wait_ended(ENDS_S) == 0
        assert "Traceback" not in node.log.read_text()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_log_that_nobody_reads_stops_nothing_and_a_hang_up_drains(tmp_path: Path) -> None:
    node = Node(
        "decode", tmp_path / "log", "--local-prefill", "--drain-timeout", "60", "--log-level", "debug", *SLOW_MODEL
    )
    reading, writing = os.pipe()
    capacity = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with running_node(node, output=writing), os.fdopen(reading, "rb") as pipe:
        os.close(writing)
        node.wait_for("/health")
        body = {"prompt": PROMPT, "max_tokens": 1}
        for number in range(40):  # a line of over 100 bytes for each, and several at debug
            name = f"{number:02}" + "x" * 100
            answer = node.http.post("/v1/completions", json=body, headers={"x-request-id": name}, timeout=60)
            assert answer.status_code == 200
            assert answer.headers["x-request-id"] == name
        stream = Stream(node, max_tokens=300)
        node.signal(signal.SIGHUP)
        until(lambda: node.http.get("/ready").status_code == 503, ENDS_S, "the signal is heard")
        ended = stream.ended()
        assert (ended.events[-1], ended.n_tokens) == ("[DONE]", 300)
        assert node.wait_ended(ENDS_S) == 0
        assert len(pipe.read()) <= capacity, "nobody read more, and the end of the process did not wait for it"
