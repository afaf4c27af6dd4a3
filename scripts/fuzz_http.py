"""HTTP that nobody should send: schemathesis against the server's own OpenAPI, and bytes that are hardly HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHECKS = "server_error_is_of_a_named_peer,status_code_conformance,content_type_conformance,response_schema_conformance"
REQUEST_TIMEOUT_S = 60
N_FUZZED_OPERATIONS = 3
"""Operations with something to vary: two kinds of completions, and one model by its name."""


def run_schemathesis(url: str, n_requests: int, seed: int, directory: Path) -> tuple[int, list[str]]:
    """At least ``n_requests`` requests, in runs with seeds from ``seed`` on; how many there were, and what is wrong.

    The whole output of the last run is ``schemathesis.log`` in ``directory``.
    """
    report, log = directory / "schemathesis.json", directory / "schemathesis.log"
    n_sent, failures = 0, list[str]()
    while n_sent < n_requests and not failures:
        n_examples = max(1, (n_requests - n_sent) // N_FUZZED_OPERATIONS)
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json"]
        command += ["--phases", "coverage,fuzzing", "--max-examples", str(n_examples), "--seed", str(seed)]
        command += ["--workers", "1", "--checks", CHECKS, "--request-timeout", str(REQUEST_TIMEOUT_S), "--no-color"]
        command += ["--suppress-health-check", "all", "--report", "json", "--report-json-path", str(report)]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "fuzz_http_hooks"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment.get("PYTHONPATH", "")])
        report.unlink(missing_ok=True)
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=directory, check=False)
        told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        n_new = told.get("test_cases", {}).get("generated", 0)
        n_sent, seed = n_sent + n_new, seed + 1
        if done.returncode or not n_new:
            failures.append(f"schemathesis ended with {done.returncode} after {n_new} requests; see {log}")
    return n_sent, failures


def send_broken(url: str, n: int, rng: random.Random) -> None:
    """``n`` connections with bytes that are no HTTP, that end in the middle, or that are not what they say."""
    body = b'{"prompt": [20, 30], "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    kinds = (
        lambda: rng.randbytes(rng.choice((1, 100, 5000))),
        lambda: whole[: rng.randrange(len(whole))],
        lambda: head + b"Content-Length: 1000000\r\n\r\n" + body,
        lambda: head + b"Content-Length: -5\r\n\r\n" + body,
        lambda: head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + body,
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + body,
        lambda: b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        lambda: b"GET /health HTTP/9.9\r\n\r\n",
        lambda: whole * 3,
    )
    parts = urlsplit(url)
    for _ in range(n):
        with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), timeout=5) as raw:
            raw.sendall(rng.choice(kinds)())
            if rng.random() < 0.5:
                raw.settimeout(0.2)
                raw.recv(100)
