"""HTTP that nobody should send: schemathesis against the server's own OpenAPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "fuzzing.http_hooks"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
        report.unlink(missing_ok=True)
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=directory, check=False)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        n_new = found.get("test_cases", {}).get("generated", 0)
        n_sent, seed = n_sent + n_new, seed + 1
        if done.returncode or not n_new:
            failures.append(f"schemathesis ended with {done.returncode} after {n_new} requests; see {log}")
    return n_sent, failures
