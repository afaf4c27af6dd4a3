"""The page in headless Chromium: nothing that a client or peer has named becomes HTML, and the chat box streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from server.api import create_app
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import FakeBackend
from tests.support import rooms
from tests.support.browser import CHROMIUM, Tab, chromium
from tests.support.http import http_server_thread

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)"),
]
KEY = "a secret key"
LOADED = "!document.querySelector('#main').hidden"
ENTER = ("Enter", 13)


class PageBackend(FakeBackend):
    """Answers for the page: as a busy node, or as an ``empty`` one."""

    def __init__(self, tokenizer: Tokenizer, role: str = "decode", *, empty: bool = False) -> None:
        super().__init__(tokenizer, role)
        self.empty = empty
        self.can_think = True
        self.model_name = rooms.HOSTILE
        self.script.answer = f"{rooms.HOSTILE} 42 äpfel 🦊"

    def server_info(self) -> dict[str, Any]:
        link = {"state": "connecting", "reason": rooms.HOSTILE, "transport": None}
        peers = [] if self.empty else [link | {"address": rooms.HOSTILE}]
        facts = {"page_size": 256, "dtype": "float32", "kernels": "cpu-1", "can_think": self.can_think}
        return super().server_info() | facts | {"peers": peers}

    def rooms(self, limit: int) -> dict[str, Any]:
        if self.empty:
            return {"node": self.role, "kept": 256, "running": [], "ended": [], "refused": []}
        return rooms.rooms(_now_us())

    def room(self, room: int) -> dict[str, Any] | None:
        found = self.rooms(1)
        return next((r for r in (*found["running"], *found["ended"]) if r["room"] == str(room)), None)

    def state(self) -> dict[str, Any]:
        return rooms.empty_state(_now_us(), self.role) if self.empty else rooms.state(_now_us())


def _now_us() -> int:
    return time.time_ns() // 1000


@pytest.fixture
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from tests.support.byte_bpe import write_tokenizer_dir

    return Tokenizer.load(write_tokenizer_dir(tmp_path_factory.mktemp("bpe")))


def serve(backend: FakeBackend, api_key: str | None = None) -> Any:
    registry = CollectorRegistry()
    return http_server_thread(create_app(backend, registry, api_key=api_key), registry)


def ask(tab: Tab, words: str) -> None:
    tab.type("#chat-text", words)
    tab.press(*ENTER)


def assert_nothing_ran(tab: Tab) -> None:
    assert tab.run("window.hacked") is None
    assert tab.run("document.querySelectorAll('img, body script').length") == 0


def test_texts_stay_texts_and_the_chat_box_streams(tab: Tab, tokenizer: Tokenizer) -> None:
    backend = PageBackend(tokenizer)
    with serve(backend) as url:
        tab.go(f"{url}/")
        tab.until(LOADED)
        assert tab.text("#role") == "Decode node"
        assert tab.run("[...document.querySelectorAll('.lane-state')].map((e) => e.innerText)") == [
            "decode",
            "component_mismatch",
        ]
        assert tab.run("document.querySelector('#chat-think').offsetParent !== null")
        tab.run("document.querySelector('.lane-id').click()")
        assert tab.text("#room-title") == f"Room {rooms.RUNNING}"
        assert f"cmpl-{rooms.HOSTILE}-0" in tab.text("#room-body")
        ask(tab, f"How many? {rooms.HOSTILE}")
        tab.until("document.querySelector('.proof .link')")
        assert tab.text(".said-text") == backend.script.answer
        proof = tab.text(".proof")
        assert "prefill 10.0.0.1:8998" in proof
        assert f"room {backend.first_room}" in proof
        for section in ("model", "peers", "failures"):
            assert rooms.HOSTILE in tab.text(f"#{section}")
        assert_nothing_ran(tab)
        assert tab.troubles == []


@pytest.mark.full
def test_stop_aborts_the_answer_and_the_next_question_brings_the_conversation(tab: Tab, tokenizer: Tokenizer) -> None:
    backend = PageBackend(tokenizer)
    backend.script.hang_after = 3
    with serve(backend) as url:
        tab.go(f"{url}/")
        tab.until(LOADED)
        ask(tab, "How many?")
        tab.until("document.querySelector('.said-text')?.innerText")
        tab.run("document.querySelector('#chat-stop').click()")
        tab.until("document.querySelector('.proof').innerText.includes('stopped')")
        tab.until("document.querySelector('#chat-stop').disabled")
        backend.script.hang_after = None
        ask(tab, "And now?")
        tab.until("document.querySelectorAll('.proof .link').length")
        prompt = tokenizer.decode(backend.requests[-1].prompt_ids)
        assert "How many?" in prompt
        assert "And now?" in prompt
        assert backend.generations[0].aborted


@pytest.mark.full
def test_an_error_is_shown_with_its_component(tab: Tab, tokenizer: Tokenizer) -> None:
    backend = PageBackend(tokenizer)
    backend.script.fail_after = 2
    with serve(backend) as url:
        tab.go(f"{url}/")
        tab.until(LOADED)
        ask(tab, "How many?")
        tab.until("document.querySelector('.said .bad')")
        assert tab.text(".said .bad") == "swa: the room failed"
        assert "failed" in tab.text(".proof")


@pytest.mark.full
def test_the_key_is_asked_for_and_kept_nowhere(tab: Tab, tokenizer: Tokenizer) -> None:
    with serve(PageBackend(tokenizer), KEY) as url:
        tab.go(f"{url}/")
        for key, next_state in (("wrong", "!document.querySelector('#key-wrong').hidden"), (KEY, LOADED)):
            tab.until("document.querySelector('#key').open")
            tab.type("#key-text", key)
            tab.press(*ENTER)
            tab.until(next_state)
        assert tab.run("JSON.stringify([localStorage.length, sessionStorage.length, document.cookie])") == '[0,0,""]'
        assert KEY not in tab.run("document.documentElement.outerHTML")
        ask(tab, "How many?")
        tab.until("document.querySelector('.proof .link')")


@pytest.mark.full
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_empty_node_has_an_empty_page(tab: Tab, tokenizer: Tokenizer, role: str) -> None:
    with serve(PageBackend(tokenizer, role, empty=True)) as url:
        tab.go(f"{url}/")
        tab.until(LOADED)
        assert tab.text("#lanes-empty") == "No request yet."
        assert tab.text("#failures") == "None."
        assert tab.run("document.querySelector('#chat').hidden") is (role == "prefill")
        assert tab.troubles == []


@pytest.mark.full
def test_the_page_notices_that_the_node_is_gone_and_back(tab: Tab, tokenizer: Tokenizer) -> None:
    with serve(PageBackend(tokenizer)) as url:
        tab.go(f"{url}/")
        tab.until(LOADED)
    tab.until("document.body.classList.contains('stale')")
    assert "no answer since" in tab.text("#status")


@pytest.mark.full
def test_reasoning_and_tool_calls_are_shown_apart(tab: Tab, tokenizer: Tokenizer) -> None:
    """Fields of a stream that other servers send too; here they come from a script in the page's place."""
    deltas = [
        {"reasoning_content": f"3 {rooms.HOSTILE}"},
        {"content": "It is 7."},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "calculator", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 3}'}}]},
    ]
    events = "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n" for delta in deltas)
    events += "data: [DONE]\n\n"
    with serve(PageBackend(tokenizer)) as url:
        tab.go(f"{url}/")
        tab.until(LOADED)
        tab.run(f"window.answer = {json.dumps(events)}; window.real = fetch; undefined")
        tab.run(
            "window.fetch = (path, options) => !path.includes('chat') ? real(path, options)"
            " : Promise.resolve(new Response((window.asked = options.body, answer))); undefined"
        )
        tab.run("document.querySelector('#chat-think').click()")
        ask(tab, "What is 3 + 4 ?")
        tab.until("document.querySelector('#chat-stop').disabled && document.querySelector('.call')")
        assert json.loads(tab.run("asked"))["thinking"] == {"type": "enabled"}
        assert tab.text(".thought-text") == f"3 {rooms.HOSTILE}"
        assert tab.text(".said-text") == "It is 7."
        assert tab.text(".call") == 'calculator({"a": 3})'
        assert_nothing_ran(tab)


@pytest.mark.full
def test_thinking_is_offered_where_the_chat_format_can_say_it(tab: Tab, tokenizer: Tokenizer) -> None:
    backend = PageBackend(tokenizer)
    backend.can_think = False
    with serve(backend) as url:
        tab.go(f"{url}/")
        tab.until(LOADED)
        tab.run("document.querySelector('#chat-think').checked = true; undefined")  # as of a node before
        assert tab.run("document.querySelector('#chat-think').offsetParent === null")
        ask(tab, "How many?")
        tab.until("document.querySelector('.proof .link')")
        assert tab.text(".said-text") == backend.script.answer


@pytest.mark.full
def test_numbers_have_three_digits_and_a_unit(tab: Tab, tokenizer: Tokenizer) -> None:
    expected = {
        "time(0)": "0 µs",
        "time(999)": "999 µs",
        "time(1000)": "1.00 ms",
        "time(999499)": "999 ms",
        "time(999500)": "1.00 s",
        "time(99940000)": "99.9 s",
        "time(150000000)": "150 s",
        "time(600000000)": "10 min",
        "time(null)": "–",
        "bytes(0)": "0 B",
        "bytes(999)": "999 B",
        "bytes(1000)": "1.00 kB",
        "bytes(33792)": "33.8 kB",
        "bytes(123456789)": "123 MB",
        "count(1234)": "1,234",
        "count(1234567)": "1.23 M",
        "plural(1, 'token')": "1 token",
        "median([3, 1, 2])": 2,
        "median([])": None,
    }
    with serve(PageBackend(tokenizer, empty=True)) as url:
        tab.go(f"{url}/")
        found = tab.run(
            f"import('/page/dom.js').then(({{ time, bytes, count, plural, median }}) => [{', '.join(expected)}])"
        )
    assert dict(zip(expected, found, strict=True)) == expected


@pytest.mark.full
def test_the_page_fits_a_phone(tab: Tab, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with serve(PageBackend(tokenizer)) as url:
        tab.size(390, 844, dark=True)
        tab.go(f"{url}/")
        tab.until(LOADED)
        assert tab.run("document.documentElement.scrollWidth") == 390
        assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 24)"
