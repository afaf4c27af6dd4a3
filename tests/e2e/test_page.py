"""The page of a real pair: eight requests on their way, an answer with its proof, and the prefill node's side of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import Pair

from tests.support.browser import CHROMIUM, chromium
from tests.support.processes import SLOW_MODEL, process_pair

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)"),
]
N_REQUESTS = 8
LOADED = "!document.querySelector('#main').hidden"
N_LANES = "document.querySelectorAll('.lane').length"
ANSWERED = "document.querySelector('.proof .link')"


@contextlib.contextmanager
def asking(pair: Pair) -> Iterator[None]:
    """While inside, eight requests are on their way; they are over on every way out."""
    body = {"prompt": "Question: Tom has 8 bags. " * 8, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=pair.d.url, trust_env=False, timeout=110) as client:
        ask = [
            threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
            for _ in range(N_REQUESTS)
        ]
        for each in ask:
            each.start()
        try:
            yield
        finally:
            for each in ask:
                each.join()


def test_the_page_shows_what_a_pair_does(tmp_path: Path) -> None:
    with process_pair(tmp_path, SLOW_MODEL, (*SLOW_MODEL, "--spec-tokens", "3")) as pair, chromium() as tab:
        tab.go(f"{pair.d.url}/")
        tab.until(LOADED)
        with asking(pair):
            tab.until(f"{N_LANES} === {N_REQUESTS}")
            tab.until("document.querySelector('.lane.runs')")
        tab.until("[...document.querySelectorAll('.lane-state')].every((e) => e.innerText === 'length')")
        tab.type("#chat-text", "Tom has 8 bags with 8 books each. How many books does Tom have?")
        tab.press("Enter", 13)
        tab.until(ANSWERED)
        proof = tab.text(".proof")
        assert f"prefill {pair.address}" in proof
        tab.run(f"{ANSWERED}.click()")
        tab.until("document.querySelector('#room-title').innerText.length > 'Room '.length")
        room = tab.text("#room-title").removeprefix("Room ")
        assert f"room {room}" in proof
        assert "TTFT" in tab.text(".phases")
        assert "handoff" in tab.text("#room-body")
        tab.go(f"{pair.p.url}/")
        tab.until(f"{N_LANES} === {N_REQUESTS + 1}")
        assert tab.run("document.querySelector('#chat').hidden")
        assert room[-7:] in tab.text("#lanes")
        assert tab.troubles == []
