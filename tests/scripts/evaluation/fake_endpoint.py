"""A small OpenAI-compatible endpoint on a real port, whose answers and accidents a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """How the endpoint behaves. ``reply`` maps a request body to the pieces of text that it streams."""

    reply: Callable[[dict[str, Any]], list[str]] = lambda body: [" It is", " 4 .", " #### 4"]
    headers: dict[str, str] = field(default_factory=lambda: {"x-pd-prefill": "127.0.0.1:8998", "x-pd-room": "7"})
    pd: dict[str, str] | None = None
    """What the last chunk tells of the prefill node."""
    status: int = 200
    done: bool = True
    at_once: bool = False
    """All pieces in one write."""
    error_event: str | None = None
    stall: threading.Event | None = None
    die_after: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def _event(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


class FakeEndpoint:
    """``url`` serves ``script``; ``stop`` makes the port refuse connections."""

    def __init__(self, script: Script) -> None:
        self.script = script
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {}, json.dumps({"data": [{"id": "fake-model"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                script.bodies.append(body)
                script.paths.append(self.path)
                if script.die_after is not None and len(script.bodies) > script.die_after:
                    endpoint.stop_listening()
                    self.connection.close()
                    return
                if script.status != 200:
                    self._send(script.status, {}, json.dumps({"error": {"message": "no prefill peer"}}).encode())
                    return
                self._stream(body)

            def _stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                for name, value in script.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                texts = script.reply(body)
                pieces = b""
                for text in texts:
                    key = {"delta": {"content": text}} if "messages" in body else {"text": text}
                    piece = _event({"choices": [{"index": 0, **key, "finish_reason": None}]})
                    if script.at_once:
                        pieces += piece
                    else:
                        self.wfile.write(piece)
                self.wfile.write(pieces)
                if script.stall is not None:
                    script.stall.wait(10)
                if script.error_event is not None:
                    self.wfile.write(_event({"error": {"message": script.error_event, "code": "prefill_lost"}}))
                    return
                self.wfile.write(_event({"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "stop"}]}))
                usage = {"prompt_tokens": 9, "completion_tokens": 2 * len(texts)}
                self.wfile.write(b": waiting\n\n")
                pd = {} if script.pd is None else {"pd": script.pd}
                self.wfile.write(_event({"choices": [], "usage": usage, **pd}))
                if script.done:
                    self.wfile.write(b"data: [DONE]\n\n")

            def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop_listening(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(script: Script) -> Iterator[FakeEndpoint]:
    """A running endpoint for the block."""
    endpoint = FakeEndpoint(script)
    try:
        yield endpoint
    finally:
        endpoint.stop_listening()
