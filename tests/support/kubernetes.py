"""A stand-in for the Kubernetes API, as far as routers use it to find pods: it lists the pods and tells of changes."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "dsv4-pd"


class PodApi:
    """The pods of one namespace. ``url`` is where it serves, ``config`` the file that says so to its clients."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self._pods: dict[str, dict[str, Any]] = {}
        self._watchers: list[queue.Queue[dict[str, Any] | None]] = []
        self._version = 1
        self._lock = threading.Lock()

    def add(self, name: str, template: dict[str, Any], ip: str) -> None:
        """A pod of a workload's ``template``, which runs and is ready."""
        meta = template["metadata"]
        pod = {
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "uid": name,
                "labels": meta["labels"],
                "annotations": meta.get("annotations", {}),
            },
            "spec": {"containers": [{"name": "server"}]},
            "status": {
                "phase": "Running",
                "podIP": ip,
                "podIPs": [{"ip": ip}],
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        self._change("ADDED", pod)

    def remove(self, name: str) -> None:
        """The pod ends: it is marked first, and then it is gone."""
        pod = self._pods[name]
        pod["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
        self._change("MODIFIED", pod)
        self._change("DELETED", pod)

    def _change(self, what: str, pod: dict[str, Any]) -> None:
        with self._lock:
            self._version += 1
            pod["metadata"]["resourceVersion"] = str(self._version)
            self._pods[pod["metadata"]["name"]] = pod
            if what == "DELETED":
                del self._pods[pod["metadata"]["name"]]
            event = {"type": what, "object": json.loads(json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}))}
            for watcher in self._watchers:
                watcher.put(event)

    def listed(self) -> dict[str, Any]:
        with self._lock:
            meta = {"resourceVersion": str(self._version)}
            return {"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": list(self._pods.values())}

    def watch(self) -> Iterator[dict[str, Any]]:
        """What changes from now on, until the server ends."""
        mine: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._watchers.append(mine)
        while (event := mine.get()) is not None:
            yield event

    @contextlib.contextmanager
    def served(self) -> Iterator[PodApi]:
        """Serves on loopback; ended on every way out."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
        context = {"cluster": "here", "user": "me", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": "unused"}}],
            "contexts": [{"name": "here", "context": context}],
            "current-context": "here",
        }
        self.config.write_text(json.dumps(config), encoding="utf-8")
        try:
            yield self
        finally:
            for watcher in self._watchers:
                watcher.put(None)
            server.shutdown()
            server.server_close()


def _handler(api: PodApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path != f"/api/v1/namespaces/{NAMESPACE}/pods":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if "watch" not in parse_qs(url.query):
                body = json.dumps(api.listed()).encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for event in api.watch():
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                    self.wfile.flush()

    return Handler
