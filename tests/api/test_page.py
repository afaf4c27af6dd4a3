"""The page's files over HTTP: what they are, how they are cached, and that nothing else can be had beside them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from server.api.page import PAGE_PATHS
from server.engine.tokenizer import Tokenizer
from tests.api.fakes import FakeBackend
from tests.api.harness import client_of

FOLDER = Path(__file__).resolve().parents[2] / "server" / "api" / "page"
SENT = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


CONTENT = {file: file.read_bytes() for file in SENT}


def path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


def test_every_file_has_its_path() -> None:
    assert {path_of(file) for file in SENT} == PAGE_PATHS


@pytest.mark.parametrize("file", SENT, ids=lambda file: file.name)
async def test_a_file_is_sent_as_it_is(client: httpx.AsyncClient, file: Path) -> None:
    answer = await client.get(path_of(file))
    assert answer.status_code == 200
    assert answer.content == CONTENT[file]
    assert answer.headers["content-type"] == TYPES[file.suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_both_nodes_have_the_page(tokenizer: Tokenizer, role: str) -> None:
    async with client_of(FakeBackend(tokenizer, role=role)) as client:
        assert (await client.get("/")).status_code == 200


async def test_a_browser_asks_every_time_and_gets_only_what_has_changed(client: httpx.AsyncClient) -> None:
    first = await client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        again = await client.get("/page/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert (await client.get("/page/main.js", headers={"if-none-match": '"other"'})).status_code == 200


@pytest.mark.parametrize("path", ["/", "/page/page.css"])
async def test_head_is_get_without_the_body(client: httpx.AsyncClient, path: str) -> None:
    get, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers, "x-request-id": ""} == {**get.headers, "x-request-id": ""}
    assert (await client.post(path)).status_code == 405


@pytest.mark.parametrize(
    "name",
    [
        "route.py",
        "__init__.py",
        "index.html",
        "",
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "%2e%2e%2f%2e%2e%2fassets%2ftiny-dsv4%2fconfig.json",
        "%2fetc%2fpasswd",
        "main.js/",
        "main.js%00",
        "MAIN.JS",
    ],
)
async def test_nothing_else_is_sent(client: httpx.AsyncClient, name: str) -> None:
    url = httpx.URL("http://test").copy_with(raw_path=f"/page/{name}".encode())
    answer = await client.get(url)
    assert answer.status_code in (307, 404), answer.text
    assert "import" not in answer.text


async def test_the_page_needs_no_key_and_what_it_reads_does(tokenizer: Tokenizer) -> None:
    async with client_of(FakeBackend(tokenizer), api_key="k" * 8) as client:
        for path in sorted(PAGE_PATHS):
            assert (await client.get(path)).status_code == 200
        for path in ("/rooms", "/state", "/server_info", "/page/other.js"):
            assert (await client.get(path)).status_code == 401


def test_files_need_no_network_and_run_no_text_as_code() -> None:
    """A prompt, a model's answer or a peer's name with HTML in it stays text: nothing makes HTML or code of strings."""
    unsafe = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|\son\w+=|javascript:"
    )
    for file in SENT:
        text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert re.findall(r"https?://|//cdn|@import|\burl\(", text) == [], file.name
        assert re.findall(unsafe, text) == [], file.name
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<style|\sstyle=|<script(?![^>]*\ssrc=)", html) == []


def test_every_file_that_is_named_exists() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:href|src)="page/([\w.]+)"', html))
    for file in FOLDER.glob("*.js"):
        named |= set(re.findall(r'from "\./([\w.]+)"', file.read_text(encoding="utf-8")))
    assert named == {file.name for file in SENT} - {"index.html"}


def test_every_element_that_a_script_looks_for_is_in_the_page() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    known = set(re.findall(r'\sid="([\w-]+)"', html))
    for file in FOLDER.glob("*.js"):
        wanted = set(re.findall(r'byId\("([\w-]+)"\)', file.read_text(encoding="utf-8")))
        assert wanted <= known, file.name
