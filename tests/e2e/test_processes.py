"""Two real processes: what kill -9 and SIGSTOP of either do to the other and to the clients."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster import Node, Pair, until

from server.cache.allocator import ItemState
from server.cache.live import LIVE_RULES
from tests.support.examples import RIGHT_ANSWER, curl_of_the_readme, refusal_of_the_readme
from tests.support.processes import SLOW_MODEL, process_pair, running_node

KNOWN_S = 17.5
"""A dead or frozen peer is known within this time, and so is the client's error."""
SERVES_AGAIN_S = 25.0
"""From the moment a node is back until requests through it succeed."""
LONG_PROMPT = [10 + i % 400 for i in range(6000)]
"""Takes the prefill node several seconds, in chunks of 64."""

P_OPTIONS = ("--chunk-tokens", "64", "--slots", "4", "--permute-ids", "3", "--poison", *SLOW_MODEL)
D_OPTIONS = ("--slots", "4", "--permute-ids", "4", "--poison", *SLOW_MODEL)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with process_pair(tmp_path_factory.mktemp("pair"), P_OPTIONS, D_OPTIONS) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """The pair, serving, with nothing under way, whatever the test before did to it."""
    shared.heal()
    return shared


def complete(node: Node, prompt: list[int], *, timeout_s: float = 60.0, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(f"{node.url}/v1/completions", json=body, timeout=timeout_s)


class Stream(threading.Thread):
    """A streamed completion that is read in a thread: its events, and how it ended."""

    def __init__(self, node: Node, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.body = {
            "prompt": [20, 30, 40],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
        }
        self.url = f"{node.url}/v1/completions"
        self.events: list[str] = []
        self.failure: httpx.TransportError | None = None
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(30)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.TransportError as error:
            self.failure = error
        self.begun.set()

    def ended(self) -> Stream:
        self.join(60)
        assert not self.is_alive()
        return self

    @property
    def n_tokens(self) -> int:
        chunks = [json.loads(event) for event in self.events if event != "[DONE]"]
        return sum(
            len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks if "choices" in c and c["choices"][0]["logprobs"]
        )

    @property
    def error(self) -> dict[str, Any]:
        """The error event at the end of the stream."""
        assert self.failure is None, f"the connection broke: {self.failure!r}"
        error: dict[str, Any] = json.loads(self.events[-1])["error"]
        return error


class Background:
    """Requests that run while the test does something to the nodes."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(8)

    def complete(self, node: Node, prompt: list[int], **fields: Any) -> Future[tuple[float, httpx.Response]]:
        def timed() -> tuple[float, httpx.Response]:
            response = complete(node, prompt, **fields)
            return time.monotonic(), response

        return self._threads.submit(timed)


def start_prefilling(pair: Pair, prompt: list[int]) -> Future[tuple[float, httpx.Response]]:
    """A request whose prompt the prefill node computes when this returns. (Of an earlier one it may hold a slot for a
    while after the first token.)
    """
    until(pair.p.all_free, 20, "the prefill node has done what came before")
    request = Background().complete(pair.d, prompt)
    wait_until_prefilling(pair)
    return request


def wait_until_prefilling(pair: Pair) -> None:
    until(lambda: pair.p.counts("slots")["reserved"] > 0, 20, "the prefill node holds a slot for the request")


def failed_rooms(node: Node) -> float:
    return sum(value for name, value in node.metrics().items() if name.startswith("pd_rooms_total{outcome=failed,"))


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_prefill_node_serves_health_information_and_metrics_and_refuses_generation(pair: Pair) -> None:
    assert pair.p.http.get("/health").json()["role"] == "prefill"
    info = pair.p.info()
    assert (info["disaggregation_mode"], info["bootstrap_port"]) == ("prefill", int(pair.address.split(":")[1]))
    assert info["model_fingerprint"] == pair.d.info()["model_fingerprint"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused = pair.p.http.post(path, json={"prompt": "hello", "messages": [{"role": "user", "content": "hi"}]})
        assert refused.status_code == 400
        assert error_of(refused)["code"] == "wrong_role"
        assert "decode node" in error_of(refused)["message"]


def test_both_nodes_count_what_a_request_moved(pair: Pair) -> None:
    before = {node.role: node.metrics() for node in (pair.p, pair.d)}
    response = complete(pair.d, [10 + i for i in range(390)])
    assert response.headers["x-pd-prefill"] == pair.address
    pair.wait_all_free()
    for node in (pair.p, pair.d):
        metrics, old = node.metrics(), before[node.role]
        for name in set(LIVE_RULES) - {"draft_swa"}:
            sample = f"pd_transfer_bytes_total{{component={name}}}"
            assert metrics[sample] > old.get(sample, 0), f"{sample} of the {node.role} node"
        assert metrics["pd_transfer_pieces_total"] > old["pd_transfer_pieces_total"]
        rooms = "pd_rooms_total{outcome=committed,reason=}"
        assert metrics[rooms] == old.get(rooms, 0) + 1
        for kind, total in (("slots", 4), ("pages", 256)):
            states = {s: metrics.get(f"pd_{kind}{{state={s}}}", 0) for s in ItemState}  # no slot is ever cached
            assert states.pop(ItemState.FREE) + states.pop(ItemState.CACHED) == total
            assert set(states.values()) == {0}
        # the decode node knows a transfer only where it lasts longer than a tick
        for phase in ("queued", "prefill", *(["transfer"] if node is pair.p else [])):
            assert metrics[f"pd_phase_seconds_count{{phase={phase}}}"] >= 1


def test_a_client_that_goes_away_frees_everything_on_both_nodes(pair: Pair) -> None:
    with httpx.stream(
        "POST",
        f"{pair.d.url}/v1/completions",
        json={"prompt": [20, 30], "max_tokens": 4000, "ignore_eos": True, "stream": True},
        timeout=30,
    ) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        complete(pair.d, LONG_PROMPT, timeout_s=1.0)
    pair.wait_all_free()


def test_a_peer_with_another_page_size_is_refused_by_name_and_the_client_is_told(pair: Pair, tmp_path: Any) -> None:
    with running_node(
        Node("decode", tmp_path / "log", "--prefill", pair.address, "--page-size", "128", *SLOW_MODEL)
    ) as other:
        other.wait_for("/health")
        until(lambda: other.info()["peers"][0]["state"] == "refused", 20, "the peer is refused")
        started = time.monotonic()
        for refused in (complete(other, [20, 30]), other.http.get("/ready")):
            assert refused.status_code == 503
            words = (
                f"prefill {pair.address} refused this decode node: page_size differs: prefill has 256, decode has 128"
            )
            assert words in error_of(refused)["message"]
        assert time.monotonic() - started < 5.0
        assert complete(pair.d, [20, 30]).status_code == 200, "the decode node that fits is served all the while"


def test_kill_9_of_the_prefill_node(pair: Pair) -> None:
    """The room in prefill fails with its peer's name; what is committed decodes on; the next prefill node is taken."""
    decoding = Stream(pair.d, max_tokens=400)
    prefilling = start_prefilling(pair, LONG_PROMPT)
    killed = time.monotonic()
    pair.p.kill()
    answered, response = prefilling.result(30)
    assert answered - killed < KNOWN_S
    assert response.status_code in (502, 503)
    assert error_of(response)["code"] == "peer_lost"
    assert pair.address in error_of(response)["message"]

    started = time.monotonic()
    refused = complete(pair.d, [20, 30])
    assert (refused.status_code, error_of(refused)["code"]) == (503, "no_prefill")
    assert pair.address in error_of(refused)["message"]
    assert time.monotonic() - started < 5.0
    assert pair.d.http.get("/health").status_code == 200
    assert pair.d.http.get("/ready").status_code == 503

    stream = decoding.ended()
    assert (stream.events[-1], stream.n_tokens) == ("[DONE]", 400), "a committed request needs its prefill node no more"
    until(pair.d.all_free, 20, "the fence frees what the dead node could have written to")

    pair.p.start()
    pair.p.wait_for("/health")
    until(lambda: complete(pair.d, [20, 30]).status_code == 200, SERVES_AGAIN_S, "D serves through the new P")
    assert complete(pair.d, [20, 30]).headers["x-pd-prefill"] == pair.address


def test_a_frozen_prefill_node_is_known_and_works_again_when_it_goes_on(pair: Pair) -> None:
    prefilling = start_prefilling(pair, LONG_PROMPT)
    pair.p.freeze()
    frozen = time.monotonic()
    try:
        answered, response = prefilling.result(30)
        assert answered - frozen < KNOWN_S
        assert response.status_code in (502, 503)
        assert pair.address in error_of(response)["message"]
        refused = complete(pair.d, [20, 30])
        assert (refused.status_code, error_of(refused)["code"]) == (503, "no_prefill")
        until(pair.d.all_free, 20, "D's memory is safe again while P is still frozen")
    finally:
        pair.p.thaw()
    until(lambda: complete(pair.d, [20, 30]).status_code == 200, SERVES_AGAIN_S, "D serves through P again")
    pair.wait_all_free()


def test_kill_9_of_the_decode_node(pair: Pair) -> None:
    """The prefill node gives up the rooms of the dead node, and a new one on the same port is served."""
    background, before = Background(), failed_rooms(pair.p)
    prompts = [background.complete(pair.d, [*LONG_PROMPT, i]) for i in (1, 2)]
    until(lambda: pair.p.counts("slots")["reserved"] == 2, 20, "the prefill node works on both")
    pair.d.kill()
    for prompt in prompts:
        with pytest.raises(httpx.TransportError):
            prompt.result(30)
    until(pair.p.all_free, KNOWN_S + 1, "P has freed the rooms of the dead decode node")
    until(lambda: pair.p.info()["peers"] == [], KNOWN_S, "P has forgotten the dead decode node")
    until(lambda: pair.p.metrics()["pd_num_requests_running"] == 0, 20, "P has forgotten its rooms")
    assert failed_rooms(pair.p) == before + 2, "given up, as the peer is gone or its memory cannot be written"
    pair.d.start()
    pair.d.wait_for("/ready")
    assert complete(pair.d, [20, 30]).headers["x-pd-prefill"] == pair.address
    pair.wait_all_free()


def test_the_readmes_forgotten_component_is_refused_as_the_readme_shows_it(pair: Pair) -> None:
    """The command line's ``--fault``, and what the same question answers afterwards."""
    pair.p.kill()
    pair.p.start("--fault", "drop:swa:1")
    pair.p.wait_for("/health")
    pair.d.wait_for("/ready")
    curl = f"{curl_of_the_readme(pair.d.port).strip()} --silent"
    failed = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
    digest = re.compile(r"\b[0-9a-f]{16}\b")
    assert len(set(digest.findall(failed))) == 2
    told, shown = (json.loads(digest.sub("DIGEST", text))["error"] for text in (failed, refusal_of_the_readme()))
    for name in ("request_id", "room"):
        assert told.pop(name)
        assert shown.pop(name)
    assert told == shown
    answered = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(answered)["choices"][0]["text"] == RIGHT_ANSWER
    pair.wait_all_free()
