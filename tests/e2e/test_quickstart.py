"""scripts/quickstart.py with the real launchers, the bundled checkpoint and real Mooncake."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def start(*options: str) -> subprocess.Popen[str]:
    """The script on free ports, in a session of its own as a terminal would give it."""
    ports = []
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for one in (a, b, c):
            one.bind(("127.0.0.1", 0))
            ports.append(str(one.getsockname()[1]))
    given = ["--prefill-port", ports[0], "--decode-port", ports[1], "--bootstrap-port", ports[2]]
    return subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "scripts" / "quickstart.py"), *options, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def pids(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"^(?:prefill|decode): pid (\d+)", output, re.MULTILINE)]


def assert_gone(output: str) -> None:
    assert len(pids(output)) == 2
    for pid in pids(output):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(180)
def test_one_command_shows_an_answer_and_its_proof() -> None:
    process = start("--once")
    output, _ = process.communicate(timeout=170)
    assert process.returncode == 0, output
    proof = re.search(r"^proof: prefill 127\.0\.0\.1:\d+ computed the (\d+) prompt tokens .*$", output, re.MULTILINE)
    assert proof, output
    assert int(proof.group(1)) > 100
    for component in ("c4_kv", "c4_index", "c128_kv", "swa", "handoff"):
        assert re.search(rf"\b{component} [\d,]+", proof.group()), f"{component} is not in: {proof.group()}"
    assert_gone(output)


@pytest.mark.timeout(180)
def test_ctrl_c_ends_the_serving_pair_cleanly() -> None:
    process = start()
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if "  curl " in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output + rest
    assert "killed" not in rest
    assert_gone(output)
