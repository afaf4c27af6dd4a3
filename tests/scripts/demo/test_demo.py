"""scripts/quickstart.py with small stand-ins for the two launchers: waiting, proof, deaths and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import free_ports
from demo.main import parse_args

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
LAUNCHER = """\
#!{python}
import json, os, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

role = {role!r}
here = pathlib.Path(__file__).parent
(here / (role + ".argv")).write_text(json.dumps(sys.argv[1:]))
(here / (role + ".pid")).write_text(str(os.getpid()))
moved = 100

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        bodies = {{"/metrics": 'pd_transfer_bytes_total{{component="swa"}} %d\\n' % moved}}
        self.answer({ready_status} if self.path == "/ready" else 200, bodies.get(self.path, "warming up"))

    def do_POST(self):
        global moved
        {on_question}
        moved += 4096
        events = [dict(choices=[dict(index=0, text=t)]) for t in (" 2 + 2", " = 4 #### 4")]
        events.append(dict(choices=[], usage=dict(prompt_tokens=321), pd=dict(prefill="127.0.0.1:8998", room="17")))
        self.answer(200, "".join("data: %s\\n\\n" % json.dumps(e) for e in events) + "data: [DONE]\\n\\n")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

print(role, "log line", flush=True)
{at_start}
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


class Quickstart:
    """Runs scripts/quickstart.py on free ports with stand-in launchers from ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(3)
        for role in ("prefill", "decode"):
            self.launcher(role)

    def launcher(self, role: str, *, at_start: str = "", ready_status: int = 200, on_question: str = "pass") -> None:
        path = self.folder / f"launch_{role}"
        path.write_text(
            LAUNCHER.format(
                python=sys.executable, role=role, at_start=at_start, ready_status=ready_status, on_question=on_question
            )
        )
        path.chmod(0o755)

    def start(self, *options: str) -> subprocess.Popen[str]:
        prefill, decode, bootstrap = self.ports
        argv = [
            "--prefill-port",
            str(prefill),
            "--decode-port",
            str(decode),
            "--bootstrap-port",
            str(bootstrap),
            *options,
        ]
        code = f"""
            import sys, pathlib, cluster.node, cluster.nodes, demo.main
            cluster.node.BIN = demo.main.LOGS = pathlib.Path({str(self.folder)!r})
            cluster.nodes.STOP_S = 2.0
            sys.exit(demo.main.main({argv!r}))
        """
        return subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(code)],
            cwd=SCRIPTS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), str(SCRIPTS)])},
        )

    def run(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def pid(self, role: str) -> int:
        return int((self.folder / f"{role}.pid").read_text())

    def assert_both_gone(self) -> None:
        for role in ("prefill", "decode"):
            if (self.folder / f"{role}.pid").exists():
                with pytest.raises(ProcessLookupError):
                    os.kill(self.pid(role), 0)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to and with the first line that holds ``text``."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came; output:\n{seen}")


@pytest.fixture
def quickstart(tmp_path: Path) -> Iterator[Quickstart]:
    pair = Quickstart(tmp_path)
    yield pair
    for role in ("prefill", "decode"):
        if (tmp_path / f"{role}.pid").exists():
            try:
                os.kill(pair.pid(role), signal.SIGKILL)
            except ProcessLookupError:
                continue


def test_once_prints_answer_and_proof_and_ends_both(quickstart: Quickstart) -> None:
    code, output = quickstart.run("--once")
    assert code == 0, output
    assert "answer: 2 + 2 = 4 #### 4" in output
    (proof,) = [line for line in output.splitlines() if line.startswith("proof:")]
    assert "prefill 127.0.0.1:8998" in proof
    assert "321 prompt tokens (room 17)" in proof
    assert "moved 4,096 bytes (swa 4,096)" in proof
    assert "TTFT" in proof
    assert "killed" not in output
    quickstart.assert_both_gone()


def test_launchers_get_ports_and_model(quickstart: Quickstart) -> None:
    code, output = quickstart.run("--once", "--model", "/models/v4")
    assert code == 0, output
    prefill, decode, bootstrap = (str(port) for port in quickstart.ports)
    prefill_argv = json.loads((quickstart.folder / "prefill.argv").read_text())
    decode_argv = json.loads((quickstart.folder / "decode.argv").read_text())
    for argv, wanted in (
        (prefill_argv, {"--port": prefill, "--bootstrap-port": bootstrap, "--model": "/models/v4"}),
        (decode_argv, {"--port": decode, "--prefill": f"127.0.0.1:{bootstrap}", "--model": "/models/v4"}),
    ):
        assert {option: argv[argv.index(option) + 1] for option in wanted} == wanted


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_while_serving_ends_both_cleanly(quickstart: Quickstart, stop: signal.Signals) -> None:
    process = quickstart.start()
    shown = read_until(process, "curl ")
    assert f"http://127.0.0.1:{quickstart.ports[1]}/v1/completions" in shown
    process.send_signal(stop)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert "killed" not in output
    quickstart.assert_both_gone()


def test_stop_signal_while_waiting_ends_both_cleanly(quickstart: Quickstart) -> None:
    quickstart.launcher("decode", ready_status=503)
    process = quickstart.start()
    read_until(process, "decode: pid")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    quickstart.assert_both_gone()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_process_that_dies_while_serving_is_named_and_the_other_ends(quickstart: Quickstart, role: str) -> None:
    process = quickstart.start()
    read_until(process, "curl ")
    os.kill(quickstart.pid(role), signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"{role} ended by itself (signal SIGKILL)" in output
    assert f"{role} log line" in output
    quickstart.assert_both_gone()


@pytest.mark.parametrize(
    ("role", "change"),
    [
        ("prefill", {"at_start": "sys.exit('bad checkpoint')"}),
        ("decode", {"at_start": "sys.exit('bad checkpoint')"}),
        ("decode", {"on_question": "print('bad checkpoint', flush=True); os._exit(1)"}),
    ],
)
def test_a_process_that_dies_early_is_named_with_its_last_words(
    quickstart: Quickstart, role: str, change: dict[str, str]
) -> None:
    quickstart.launcher(role, at_start=change.get("at_start", ""), on_question=change.get("on_question", "pass"))
    code, output = quickstart.run("--once")
    assert code == 1
    assert f"{role} ended by itself (exit code 1)" in output
    assert "bad checkpoint" in output
    quickstart.assert_both_gone()


def test_an_answer_without_transferred_bytes_is_no_proof(quickstart: Quickstart) -> None:
    quickstart.launcher("decode", on_question="moved -= 4096")
    code, output = quickstart.run("--once")
    assert code == 1
    assert "no proof" in output
    quickstart.assert_both_gone()


def test_not_ready_in_time_says_why(quickstart: Quickstart) -> None:
    quickstart.launcher("decode", ready_status=503)
    code, output = quickstart.run("--ready-timeout", "1")
    assert code == 1
    assert "/ready was not ready after 1 s: HTTP 503 warming up" in output
    quickstart.assert_both_gone()


def test_a_process_that_will_not_end_is_killed_and_said_so(quickstart: Quickstart) -> None:
    quickstart.launcher("prefill", at_start="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    started = time.monotonic()
    code, output = quickstart.run("--once")
    assert code == 0
    assert "prefill did not end within 2 s and was killed" in output
    assert time.monotonic() - started < 30
    quickstart.assert_both_gone()


def test_a_signal_while_both_are_ending_leaves_nobody_behind(quickstart: Quickstart) -> None:
    quickstart.launcher("prefill", at_start="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    process = quickstart.start("--once")
    read_until(process, "proof:")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    quickstart.assert_both_gone()


@pytest.mark.parametrize(("index", "purpose"), [(0, "prefill"), (1, "decode"), (2, "bootstrap")])
def test_a_taken_port_is_named_before_anything_starts(quickstart: Quickstart, index: int, purpose: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", quickstart.ports[index]))
        taken.listen()
        code, output = quickstart.run("--once")
    assert code == 2
    assert f"{purpose} port 127.0.0.1:{quickstart.ports[index]} cannot be used" in output
    assert f"--{purpose}-port" in output
    assert not (quickstart.folder / "prefill.pid").exists()


@pytest.mark.parametrize(
    ("one", "other"),
    [("prefill", "decode"), ("prefill", "bootstrap"), ("decode", "bootstrap")],
)
def test_one_port_for_two_purposes_is_refused(capsys: pytest.CaptureFixture[str], one: str, other: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args([f"--{one}-port", "7000", f"--{other}-port", "7000"])
    assert f"--{one}-port and --{other}-port are both 7000" in capsys.readouterr().err


def test_the_help_that_needs_no_set_up_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    shown = subprocess.run([SCRIPTS / "quickstart", "--help"], capture_output=True, text=True, check=True, timeout=30)
    assert options
    assert options == set(re.findall(r"^  (--[a-z-]+) ", shown.stdout, re.MULTILINE))


def test_a_missing_launcher_is_named(quickstart: Quickstart) -> None:
    (quickstart.folder / "launch_decode").unlink()
    code, output = quickstart.run("--once")
    assert code == 1
    assert "decode cannot be started" in output
    quickstart.assert_both_gone()
