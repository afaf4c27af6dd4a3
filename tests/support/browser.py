"""Headless Chromium, driven over its DevTools protocol through a pipe: no driver and no websocket is needed."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ANSWER_S = 60.0
"""A command's answer on a busy machine; usually milliseconds."""
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it does not run as root with one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--mute-audio",
)
_WITH_PIPES = """
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and answers on descriptor 4."""


class BrowserFailed(Exception):
    """Chromium, or a script in its page, did not do what was asked."""


class Tab:
    """One page. ``troubles`` has every exception, refused resource and console error in it so far."""

    def __init__(self, browser: _Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self.troubles: list[str] = []
        browser.tabs[session] = self
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.command(method, params, self._session)

    def go(self, url: str) -> None:
        """Opens a page and waits until it is loaded."""
        answer = self.command("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserFailed(f"{url}: {answer['errorText']}")
        self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        answer = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserFailed(f"{script}: {answer['exceptionDetails']['exception'].get('description', answer)}")
        return answer["result"].get("value")

    def until(self, script: str, timeout_s: float = ANSWER_S) -> None:
        """Waits until the expression is true."""
        until(lambda: self.run(f"Boolean({script})"), timeout_s, script)

    def text(self, selector: str) -> str:
        value: str = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return value

    def type(self, selector: str, text: str) -> None:
        """As a keyboard does, into the element."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.command("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        text = {"Enter": "\r"}.get(key, "")
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.command("Input.dispatchKeyEvent", type="keyUp", **event)

    def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Of the window, in CSS pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, whole: bool = False, **options: Any) -> None:
        """Of what the window shows, or of the ``whole`` page; ``options`` such as ``format="webp", quality=80``."""
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=whole, **options)
        path.write_bytes(base64.b64decode(answer["data"]))

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.troubles.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.troubles.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.troubles.append(str(params["args"]))


class _Chromium:
    def __init__(self, profile: Path) -> None:
        to_read, self._commands = os.pipe()
        self._answers, to_write = os.pipe()
        command = [str(CHROMIUM), *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WITH_PIPES, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(to_read)
        os.close(to_write)
        self.tabs: dict[str, Tab] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._reader = threading.Thread(target=self._read, name="chromium", daemon=True)
        self._reader.start()

    def command(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._waiting[number] = queue.SimpleQueue()
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._commands, left) :]
        try:
            answer = self._waiting[number].get(timeout=ANSWER_S)
        except queue.Empty:
            raise BrowserFailed(f"{method}: no answer within {ANSWER_S:g} s") from None
        finally:
            del self._waiting[number]
        if "error" in answer:
            raise BrowserFailed(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def new_tab(self) -> Tab:
        target = self.command("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.command("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        return Tab(self, session)

    def close(self) -> None:
        with contextlib.suppress(BrowserFailed, OSError):
            self.command("Browser.close", {})
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._commands)
        self._reader.join(10)

    def _read(self) -> None:
        rest = b""
        with os.fdopen(self._answers, "rb", buffering=0) as answers:
            while block := answers.read(1 << 16):
                *messages, rest = (rest + block).split(b"\0")
                for message in map(json.loads, messages):
                    self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if (waiting := self._waiting.get(message["id"])) is not None:
                waiting.put(message)
        elif (tab := self.tabs.get(message.get("sessionId", ""))) is not None:
            tab.on_event(message["method"], message.get("params", {}))


@contextlib.contextmanager
def chromium() -> Iterator[Tab]:
    """A tab of a new Chromium with a profile of its own; ended on every way out."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = _Chromium(Path(profile))
        try:
            yield browser.new_tab()
        finally:
            browser.close()
