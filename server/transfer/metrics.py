"""Prometheus metrics of one node, prefill or decode, on a registry of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from server.cache.allocator import Allocator, ItemState
from server.failure import Failure

_PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class NodeMetrics:
    """One set of names for both nodes: a decode node counts what it committed, a prefill node what it sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._bytes = Counter(
            "pd_transfer_bytes", "State bytes transferred, by component.", ["component"], registry=registry
        )
        self._pieces = Counter("pd_transfer_pieces", "Contiguous writes that carried them.", registry=registry)
        self._rooms = Counter("pd_rooms", "Rooms that ended, by how and why.", ["outcome", "reason"], registry=registry)
        self._phase = Histogram(
            "pd_phase_seconds", "Time a room spent in a phase.", ["phase"], buckets=_PHASE_BUCKETS_S, registry=registry
        )
        self._retries = Counter(
            "pd_retries",
            "Rooms tried again on another prefill node, by why they failed.",
            ["reason"],
            registry=registry,
        )
        self._quarantine = Gauge(
            "pd_quarantine_oldest_seconds",
            "For how long the oldest room waits for its prefill node's writes to end.",
            registry=registry,
        )
        self._slots = Gauge("pd_slots", "Request slots, by state.", ["state"], registry=registry)
        self._pages = Gauge("pd_pages", "KV pages, by state.", ["state"], registry=registry)
        self._queued = Gauge("pd_queued_requests", "Requests waiting for a slot and pages.", registry=registry)
        self._running = Gauge("pd_running_requests", "Requests that hold a slot.", registry=registry)
        self._peers = Gauge("pd_peers", "Peers with a valid registration.", registry=registry)
        self._dropped = Counter(
            "pd_control_frames_dropped",
            "Control frames that were not obeyed, by why (garbage, corrupt, malformed, oversize, version, ...).",
            ["reason"],
            registry=registry,
        )
        self._received = Counter(
            "pd_control_frames_received", "Control frames that arrived, obeyed or dropped.", registry=registry
        )
        self._refusals = Counter(
            "pd_peer_refusals",
            "Peers refused, by the field of the manifest that differs.",
            ["field"],
            registry=registry,
        )
        self._handshakes = Counter(
            "pd_control_handshakes_refused",
            "Connections to the bootstrap port that came to nothing, by why (address, key, mechanism, ...).",
            ["reason"],
            registry=registry,
        )
        self._fences = Counter(
            "pd_fences", "Transport sessions closed to make quarantined memory safe.", registry=registry
        )

        self._checks = Counter(
            "pd_check_failures",
            "Rooms that this node refused, by check and state component.",
            ["check", "component"],
            registry=registry,
        )

    def show_kernels(self, identity: str, reason: str) -> None:
        """Adds what computes here, and why, as labels of a metric that is always 1."""
        Info("pd_kernels", "What computes the model here, and why.", registry=self.registry).info(
            {"kernels": identity, "reason": reason}
        )

    def watch(
        self,
        allocator: Allocator,
        *,
        queued: Callable[[], int],
        running: Callable[[], int],
        peers: Callable[[], int],
        quarantine_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Reads the gauges from their owners whenever the metrics are scraped."""
        for gauge, kind in ((self._slots, "slots"), (self._pages, "pages")):
            for state in ItemState:
                gauge.labels(state.value).set_function(partial(_count, allocator, kind, state))
        self._queued.set_function(queued)
        self._running.set_function(running)
        self._peers.set_function(peers)
        self._quarantine.set_function(quarantine_s)

    def transferred(self, nbytes: Mapping[str, int], n_pieces: int) -> None:
        for component, count in nbytes.items():
            self._bytes.labels(component).inc(count)
        self._pieces.inc(n_pieces)

    def room_ended(self, outcome: str, reason: str) -> None:
        self._rooms.labels(outcome, reason).inc()

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def phase(self, name: str, seconds: float) -> None:
        self._phase.labels(name).observe(seconds)

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()

    def check_failed(self, failure: Failure) -> None:
        """Counts a failure that a check found; any other is left out."""
        if failure.check:
            self._checks.labels(failure.check, failure.component).inc()

    def received(self) -> None:
        self._received.inc()

    def refused(self, field: str) -> None:
        self._refusals.labels(field).inc()

    def handshake_refused(self, reason: str) -> None:
        self._handshakes.labels(reason).inc()

    def fenced(self) -> None:
        self._fences.inc()


def _count(allocator: Allocator, kind: str, state: ItemState) -> float:
    return allocator.counts()[kind][state]
