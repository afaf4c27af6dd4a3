"""Two prefill and two decode nodes behind the real routers: what they relay, and nodes that die, come and go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import Cluster, Node, until

from tests.support.examples import QUESTION
from tests.support.processes import DRAIN_S, END_S
from tests.support.routers import KINDS, Router

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 3, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [3, 7]}, "op": {"enum": ["+", "-"]}, "b": {"enum": [4, 12]}},
            "required": ["a", "op", "b"],
            "additionalProperties": False,
        },
    },
}
HEALS_S = 60.0
PAUSE_S = 0.05
"""Between the requests of one client, so that whatever else has to happen gets its turn on a small machine."""

pytestmark = pytest.mark.timeout(300)


@dataclass
class House:
    """Two prefill and two decode nodes, and one more of each that is not started."""

    folder: Path
    prefill: list[Node] = field(default_factory=list)
    decode: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        shared = ("--slots", "4")
        self.prefill = [Node("prefill", self.log(f"p{i}"), *shared, name=f"p{i}") for i in range(3)]
        peers = [word for node in self.prefill for word in ("--prefill", node.address)]
        options = (*shared, *peers, "--spec-tokens", "3")
        self.decode = [Node("decode", self.log(f"d{i}"), *options, name=f"d{i}") for i in range(3)]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    @property
    def pairs(self) -> list[Node]:
        return [*self.prefill[:2], *self.decode[:2]]

    def heal(self) -> None:
        """The four nodes serve, hold nothing, and every decode node knows both prefill nodes."""
        Cluster(self.pairs).heal()
        for node in self.decode[:2]:
            wait_known(node, self.prefill[:2])


def registered(node: Node) -> set[str]:
    """The prefill nodes that a decode node could use now."""
    return {peer["address"] for peer in node.info()["peers"] if peer["state"] == "registered"}


def wait_known(decode: Node, prefill: Sequence[Node]) -> None:
    wanted = {node.address for node in prefill}
    until(lambda: wanted <= registered(decode), HEALS_S, f"{decode.name} knows the prefill nodes")


def wait_asked(node: Node, n_before: int = 0) -> None:
    until(lambda: answered(node) > n_before, HEALS_S, f"{node.name} is asked")


def answered(node: Node, path: str = COMPLETIONS) -> int:
    """How many requests the node has answered well."""
    return int(node.samples("pd_http_responses_total").get((path, "200"), 0))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    if all(kind.missing for kind in KINDS.values()):
        pytest.skip("; ".join(kind.missing for kind in KINDS.values()))
    house = House(tmp_path_factory.mktemp("routers"))
    try:
        house.heal()
        yield house
    finally:
        Cluster([*house.prefill, *house.decode]).stop(END_S, DRAIN_S)


@pytest.fixture(params=sorted(KINDS))
def router(request: pytest.FixtureRequest, house: House) -> Iterator[Router]:
    kind = KINDS[request.param]
    if kind.missing:
        pytest.skip(kind.missing)
    house.heal()
    with Router(kind, house.log(request.param), house.pairs).running() as router:
        yield router


def events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", answer.text
    return [json.loads(line) for line in lines[:-1]]


def choices(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def without_meta(answer: Any) -> Any:
    return [(one["text"], one["output_ids"]) for one in (answer if isinstance(answer, list) else [answer])]


def calls(answer: httpx.Response) -> list[tuple[str, str]]:
    """Name and arguments of every call of an answer, whole or streamed; their ids are drawn anew each time."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        [choice] = choices(answer)
        return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    found: dict[int, list[str]] = {}
    for event in events(answer):
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                function, parts = call["function"], found.setdefault(call["index"], ["", ""])
                parts[0] += function.get("name") or ""
                parts[1] += function.get("arguments") or ""
    return [(name, arguments) for name, arguments in found.values()]


def test_answers_are_those_of_the_decode_node_itself(house: House, router: Router) -> None:
    """Whole and streamed, one sample and three, on every route, of both prefill and both decode nodes."""
    direct = house.decode[0].http
    before = {node.name: answered(node) for node in house.pairs}
    prompt = {"model": "tiny-dsv4", "prompt": QUESTION}
    chat = {"model": "tiny-dsv4", "messages": [{"role": "user", "content": "What is 3 + 4 ?"}]}
    prefilled = set()
    for fields in (GREEDY, SAMPLED):
        for path, body in ((COMPLETIONS, prompt), (CHAT, chat)):
            wanted = choices(direct.post(path, json={**body, **fields}))
            assert choices(router.http.post(path, json={**body, **fields})) == wanted
            texts = [""] * len(wanted)
            for event in events(router.http.post(path, json={**body, **fields, "stream": True})):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            assert texts == [choice.get("text") or choice["message"]["content"] for choice in wanted]
    tools = {
        **chat,
        "max_tokens": 256,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    called = calls(direct.post(CHAT, json=tools))
    assert [name for name, _ in called] == ["calculator"]
    assert calls(router.http.post(CHAT, json=tools)) == called
    assert calls(router.http.post(CHAT, json={**tools, "stream": True})) == called
    for _ in range(8):
        answer = router.http.post(COMPLETIONS, json={**prompt, **GREEDY})
        prefilled.add(answer.json()["pd"]["prefill"])
    assert prefilled == {node.address for node in house.prefill[:2]}
    assert all(answered(node) > before[node.name] for node in house.pairs)
    for n in (1, 3):
        sampling: dict[str, Any] = {
            "max_new_tokens": 12,
            "temperature": 0.9,
            "sampling_seed": 5,
            "n": n,
            "ignore_eos": True,
        }
        asked: dict[str, Any] = {"text": QUESTION, "sampling_params": sampling, "return_logprob": True}
        wanted = without_meta(direct.post(GENERATE, json=asked).json())
        answer = router.http.post(GENERATE, json=asked).json()
        assert without_meta(answer) == wanted
        info = answer[0]["meta_info"] if n > 1 else answer["meta_info"]
        assert (info["input_token_logprobs"], len(info["output_token_logprobs"])) == ([], 12)
        last = {
            event.get("index", 0): event for event in events(router.http.post(GENERATE, json={**asked, "stream": True}))
        }
        assert without_meta([last[i] for i in range(n)]) == wanted
    scored = {
        "text": QUESTION,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    wanted, found = (
        http.post(GENERATE, json=scored).json()["meta_info"]["input_token_logprobs"] for http in (direct, router.http)
    )
    assert [entry[1] for entry in found] == [entry[1] for entry in wanted]
    assert found[0][0] is wanted[0][0] is None
    assert [entry[0] for entry in found[1:]] == pytest.approx([entry[0] for entry in wanted[1:]])  # read, written again
    for path in ("/health_generate", "/get_model_info", "/get_server_info", "/get_loads"):
        assert router.http.get(path).status_code == 200, path
    flushed = router.http.post("/flush_cache")
    assert (flushed.status_code, flushed.json()["workers_flushed"]) == (200, 4)


class Load:
    """Clients that ask all the time, in threads: what they got."""

    def __init__(self, router: Router, n_clients: int, wanted: str) -> None:
        self._router, self._wanted = router, wanted
        self._end = threading.Event()
        self.n_good = [0] * n_clients
        self.failures: list[str] = []
        """Of requests that were refused or broke."""
        self.wrong: list[str] = []
        """Answers that are neither right nor an error."""
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(n_clients)]

    def _run(self, i: int) -> None:
        body = {"model": "tiny-dsv4", "prompt": QUESTION, **GREEDY, "max_tokens": 48, "stream": bool(i % 2)}
        with httpx.Client(base_url=self._router.url, timeout=60, trust_env=False) as http:
            while not self._end.is_set():
                try:
                    self._look_at(i, http.post(COMPLETIONS, json=body))
                except httpx.TransportError as error:
                    self.failures.append(repr(error))
                time.sleep(PAUSE_S)

    def _look_at(self, i: int, answer: httpx.Response) -> None:
        if answer.status_code >= 500 or '"error"' in answer.text:
            self.failures.append(answer.text[-300:])
            return
        if i % 2:
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
            if lines[-1:] != ["[DONE]"]:
                self.failures.append(f"a stream broke off: {answer.text[-200:]}")
                return
            text = "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])
        else:
            text = choices(answer)[0]["text"]
        if text == self._wanted:
            self.n_good[i] += 1
        else:
            self.wrong.append(text)

    def all_answered(self, n_more: int) -> None:
        """Until every client has got ``n_more`` good answers from now on."""
        now = list(self.n_good)
        enough = lambda: all(new >= old + n_more for new, old in zip(self.n_good, now, strict=True))  # noqa: E731
        until(enough, HEALS_S, f"every client is answered: {self.n_good} after {now}, {self.failures[-3:]}")

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._end.set()
            for thread in self._threads:
                thread.join(60)


@contextmanager
def loaded(house: House, router: Router, n_clients: int = 6) -> Iterator[Load]:
    body = {"prompt": QUESTION, **GREEDY, "max_tokens": 48}
    wanted = choices(house.decode[0].http.post(COMPLETIONS, json=body))[0]["text"]
    with Load(router, n_clients, wanted).running() as load:
        load.all_answered(2)
        yield load
        load.all_answered(2)
    assert load.wrong == []


@pytest.mark.full
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_dies_under_load_costs_no_wrong_answer_and_serves_again(
    house: House, router: Router, role: str
) -> None:
    """While it is dead the router goes on with the others, after it was counted out without any failure."""
    victim = getattr(house, role)[1]
    with loaded(house, router) as load:
        victim.kill()
        load.all_answered(2)
        until(lambda: victim.url not in router.healthy(), HEALS_S, "the router counts the dead node out")
        load.all_answered(1)  # what was under way meanwhile is over
        n_failures = len(load.failures)
        load.all_answered(3)
        assert load.failures[n_failures:] == []
        victim.start()
        victim.wait_for(victim.ready_path)
        until(lambda: victim.url in router.healthy(), HEALS_S, "the router counts the node in again")
        wait_asked(victim, answered(victim))
    house.heal()


@pytest.mark.full
def test_nodes_come_and_go_under_load(house: House, router: Router) -> None:
    """No request fails by it."""
    p2, d2 = house.prefill[2], house.decode[2]
    try:
        with loaded(house, router) as load:
            p2.start()
            for node in house.decode[:2]:
                wait_known(node, house.prefill)
            d2.start()
            d2.wait_for(d2.ready_path)
            wait_known(d2, house.prefill)
            for node in (p2, d2):
                router.add(node)
                wait_asked(node)
            for node in (house.prefill[0], house.decode[0]):
                router.remove(node)
            load.all_answered(2)
            n_before = [answered(node) for node in (house.prefill[0], house.decode[0])]
            load.all_answered(3)
            assert [answered(node) for node in (house.prefill[0], house.decode[0])] == n_before
        assert load.failures == []
    finally:
        for node in (p2, d2):
            if node.running:
                node.kill()
