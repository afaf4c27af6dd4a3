"""scripts/quickstart.py with the real launchers, the bundled checkpoint and real Mooncake."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import free_ports, until

from tests.support.examples import (
    README,
    RIGHT_ANSWER,
    commands,
    curl_of_the_readme,
    openai_of_the_readme,
    tools_of_the_readme,
)

ROOT = Path(__file__).resolve().parents[2]


WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that gets SIGTERM when its parent has ended, however that was."""


def start(*options: str) -> subprocess.Popen[str]:
    """The script on free ports, in a session of its own as a terminal would give it. It ends with this process."""
    ports = [str(port) for port in free_ports(3)]
    given = ["--prefill-port", ports[0], "--decode-port", ports[1], "--bootstrap-port", ports[2]]
    return subprocess.Popen(
        [
            *(sys.executable, "-S", "-c", WITH_PARENT, str(os.getpid())),
            *(sys.executable, "-u", str(ROOT / "scripts" / "quickstart.py"), *options, *given),
        ],
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


@pytest.mark.timeout(240)
def test_the_examples_are_answered_right_until_ctrl_c_ends_the_pair_cleanly() -> None:
    """What the quickstart suggests at its end, and what the README asks "with the pair of the quickstart running"."""
    process = start()
    try:
        output, shown = read_until(process, "curl ")
        shown += "".join(itertools.islice(process.stdout or (), 2))
        (port,) = re.findall(r"curl http://127\.0\.0\.1:(\d+)/", shown)
        assert shown == curl_of_the_readme(port)
        answer = json.loads(run("bash", "-c", f"{shown.strip()} --silent"))
        assert answer["choices"][0]["text"] == RIGHT_ANSWER
        assert run(sys.executable, "-c", openai_of_the_readme(port)) == RIGHT_ANSWER.lstrip()
        program, printed = tools_of_the_readme(port)
        assert run(sys.executable, "-c", program) == printed
        (gsm8k,) = [words for words in commands(README) if "--require-prefill" in words]
        few = ("--num-questions", "4", "--min-accuracy", "0.75")
        run(sys.executable, str(ROOT / gsm8k[1]), "--base-url", f"http://127.0.0.1:{port}", "--require-prefill", *few)
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output + rest
    assert "killed" not in rest
    assert_gone(output)


@pytest.mark.timeout(120)
def test_it_ends_with_the_tests_that_have_started_it() -> None:
    """Also where those are killed: before, a test run that was ended from outside left a pair behind."""
    code = "from tests.e2e.test_quickstart import start; print(start().pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
    ) as tests:  # fmt: skip
        pid = int((tests.stdout or sys.stdin).readline())
        tests.kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), 100, "the quickstart has ended")


def read_until(process: subprocess.Popen[str], words: str) -> tuple[str, str]:
    """What it has said up to the line with these words, and that line."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if words in line:
            return output, line
    raise AssertionError(f"{words!r} never came:\n{output}")


def run(*command: str) -> str:
    """Its standard output; it must end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
