"""Two real processes that are told to end, or of which a part dies: exit codes, and what the clients learn."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import ROOT, Node, Pair, until

from tests.e2e.test_processes import (
    LONG_PROMPT,
    Background,
    Stream,
    complete,
    error_of,
    start_prefilling,
    wait_until_prefilling,
)
from tests.support.processes import SLOW_MODEL, process_pair, running_node

P_OPTIONS = ("--chunk-tokens", "64", "--slots", "1", "--pages", "32", *SLOW_MODEL)
D_OPTIONS = ("--slots", "4", "--drain-timeout", "90", *SLOW_MODEL)
PROMPT = LONG_PROMPT[:1500]
"""Takes the prefill node about a second."""
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: .+")
ENDS_S = 20.0
"""A process that has nothing more to do, or may not go on, has ended."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with process_pair(tmp_path_factory.mktemp("pair"), P_OPTIONS, D_OPTIONS) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Pair:
    shared.heal()
    return shared


def assert_refused(response: httpx.Response, *codes: str) -> None:
    assert response.status_code == 503, response.text
    assert error_of(response)["code"] in codes
    assert int(response.headers["retry-after"]) > 0


def restart(node: Node, path: str, *options: str) -> None:
    node.kill()
    node.start(*options)
    node.wait_for(path)


def test_a_clean_start_says_only_what_a_person_needs_and_each_request_has_one_line(pair: Pair) -> None:
    for node in (pair.p, pair.d):
        lines = node.log.read_text().splitlines()
        assert all(LINE.fullmatch(line) for line in lines)
        assert [line for line in lines if " WARNING " in line and "data plane is not protected" not in line] == []
        assert [line for line in lines if " ERROR " in line or "uvicorn" in line] == []
    named = {"x-request-id": "the client's <one>"}
    answer = pair.d.http.post("/v1/completions", json={"prompt": [20, 30], "max_tokens": 3, "n": 2}, headers=named)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "theclientsone")
    assert answer.json()["id"] == "cmpl-theclientsone"
    assert answer.json()["pd"]["request_id"] == "theclientsone"
    rooms = answer.headers["x-pd-room"].split(",")
    assert answer.json()["pd"]["room"].split(",") == rooms
    until(lambda: len(request_lines(pair.p)) == len(request_lines(pair.d)) == 2, 20, "the lines of two requests")
    for index, room in enumerate(rooms):
        start = f"request id=cmpl-theclientsone-{index} room={room} "
        (line,) = [line for line in request_lines(pair.d) if start in line]
        pattern = rf"prefill={pair.address} tokens_in=2 tokens_out=3( [a-z]+_s=\d+\.\d{{3}}){{4}} outcome=length"
        assert re.search(pattern, line), line
        assert re.findall(r"([a-z]+)_s=", line) == ["queue", "prefill", "transfer", "decode"]
        (line,) = [line for line in request_lines(pair.p) if start in line]
        assert re.search(r"decode=[0-9a-f]{8} tokens_in=2 tokens_out=1 .* outcome=committed", line), line
        assert re.findall(r"([a-z]+)_s=", line) == ["queue", "prefill", "transfer", "commit"]
    refused = pair.d.http.post(
        "/v1/completions", json={"prompt": [20], "max_tokens": 0}, headers={"x-request-id": "bad"}
    )
    assert refused.json()["error"]["request_id"] == refused.headers["x-request-id"] == "bad"
    until(lambda: "request id=bad status=400 outcome=invalid_value" in pair.d.log_tail(), 20, "the refusal's line")


def request_lines(node: Node) -> list[str]:
    return [line for line in node.log.read_text().splitlines() if " request id=cmpl-" in line]


def test_a_prefill_node_that_is_told_to_end_finishes_its_transfers(pair: Pair) -> None:
    both = [Background().complete(pair.d, PROMPT) for _ in range(2)]
    wait_until_prefilling(pair)
    until(lambda: pair.p.info()["waiting"] == 1, 20, "one of them waits")
    pair.p.signal(signal.SIGTERM)
    assert_refused(complete(pair.d, [20, 30]), "shutting_down", "no_prefill")
    answer, refused = sorted((one.result(60)[1] for one in both), key=lambda response: response.status_code)
    assert_refused(refused, "shutting_down")
    assert (answer.status_code, answer.headers["x-pd-prefill"]) == (200, pair.address)
    assert pair.p.wait_ended(ENDS_S) == 0


def test_a_decode_node_that_is_told_to_end_finishes_its_answers_and_refuses_new_ones(pair: Pair) -> None:
    decoding = Stream(pair.d, max_tokens=100)
    prefilling = start_prefilling(pair, PROMPT)
    pair.d.signal(signal.SIGINT)
    until(lambda: pair.d.http.get("/ready").status_code == 503, 5, "it is not ready any more")
    assert pair.d.http.get("/health").status_code == 200
    assert_refused(complete(pair.d, [20, 30]), "shutting_down")
    assert prefilling.result(60)[1].status_code == 200
    stream = decoding.ended()
    assert (stream.events[-1], stream.n_tokens) == ("[DONE]", 100)
    assert pair.d.wait_ended(ENDS_S) == 0


def test_what_is_not_over_after_the_drain_time_fails_by_name(pair: Pair) -> None:
    restart(pair.d, "/ready", "--drain-timeout", "0.5")
    decoding = Stream(pair.d, max_tokens=8000)
    pair.d.signal(signal.SIGTERM)
    assert decoding.ended().error["code"] == "shutting_down"
    assert pair.d.wait_ended(ENDS_S) == 0


def test_a_second_signal_ends_at_once(pair: Pair) -> None:
    decoding = Stream(pair.d, max_tokens=8000)
    told = time.monotonic()
    pair.d.signal(signal.SIGTERM)
    until(lambda: pair.d.http.get("/ready").status_code == 503, 5, "the first is heard")
    pair.d.signal(signal.SIGTERM)
    assert pair.d.wait_ended(ENDS_S) == 0
    assert time.monotonic() - told < ENDS_S, "not the 90 s of the drain time"
    assert decoding.ended().error["code"] == "shutting_down"


def test_a_dead_engine_thread_ends_the_process_with_1_and_the_client_is_told(tmp_path: Path) -> None:
    program = (sys.executable, str(Path(__file__).with_name("dying_node.py")))
    with running_node(Node("decode", tmp_path / "log", "--local-prefill", program=program)) as node:
        node.wait_for("/health")
        response = complete(node, [20, 30], max_tokens=50)
        assert_refused(response, "node_died")
        assert "the thread 'engine' has ended" in error_of(response)["message"]
        assert node.wait_ended(ENDS_S) == 1
    assert "stopping: the thread 'engine' has ended" in node.log.read_text(errors="replace")


def test_a_phase_that_there_is_not_is_refused_at_start() -> None:
    command = [sys.executable, "-m", "server.prefill", "--port", "0", "--deadline", "prefil=3"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("launch_prefill: --deadline prefil=3: no phase 'prefil'; there are peer, ")
