"""What surrounds the process of a node: closed streams, a log that nobody reads, a terminal that hangs up."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_processes import Stream
from tests.support.processes import ROOT, NodeProcess, free_port, until

ENDS_S = 60.0
PROMPT = [20, 30, 40]


def start(node: NodeProcess, *wrapper: str, stderr: int = subprocess.DEVNULL) -> None:
    """Starts ``node`` as the last words of ``wrapper``."""
    command = [*wrapper, sys.executable, "-m", f"server.{node.role}", "--port", str(node.port), *node.options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    node.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT, env=environment)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_without_standard_streams_serves_and_ends_when_its_terminal_does(tmp_path: Path, role: str) -> None:
    options = ("--bootstrap-port", "0") if role == "prefill" else ("--prefill", f"127.0.0.1:{free_port()}")
    node = NodeProcess(role, tmp_path / "log", *options)
    start(node, "sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    try:
        node.wait_for("/health")
        assert node.metrics()
        node.signal(signal.SIGHUP)
        assert node.wait_ended(ENDS_S) == 0
    finally:
        node.close()


def test_nohup_is_respected(tmp_path: Path) -> None:
    node = NodeProcess("decode", tmp_path / "log", "--local-prefill")
    start(node, "nohup")
    try:
        node.wait_for("/health")
        assert node.process is not None
        status = Path(f"/proc/{node.process.pid}/status").read_text()
        ignored = int(re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)[0], 16)
        assert ignored & 1 << (signal.SIGHUP - 1)
    finally:
        node.close()


def test_a_node_that_is_told_to_end_while_it_loads_ends_without_a_traceback(tmp_path: Path) -> None:
    node = NodeProcess("decode", tmp_path / "log", "--local-prefill")
    start(node, stderr=subprocess.PIPE)
    try:
        until(lambda: is_listening(node.port), ENDS_S, "it has its port")
        node.signal(signal.SIGINT)
        assert node.process is not None
        _, said = node.process.communicate(timeout=ENDS_S)
        assert node.process.returncode == 0
        assert b"Traceback" not in said
    finally:
        node.close()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_log_that_nobody_reads_stops_nothing_and_a_hang_up_drains(tmp_path: Path) -> None:
    node = NodeProcess("decode", tmp_path / "log", "--local-prefill", "--drain-timeout", "60", "--log-level", "debug")
    reading, writing = os.pipe()
    capacity = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    start(node, stderr=writing)
    os.close(writing)
    try:
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
        with os.fdopen(reading, "rb") as pipe:
            reading = -1
            log = pipe.read().decode()
        assert len(log) <= capacity, "nobody read more, and the end of the process did not wait for it"
    finally:
        node.close()
        if reading >= 0:
            os.close(reading)
