"""Prometheus metrics of one node, prefill or decode, on a registry of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from server.cache.allocator import Allocator, ItemState
from server.cache.prefix import PrefixCache
from server.failure import KINDS, Failure
from server.transfer.checks import PLACEMENT, Check
from server.transfer.manifest import AUTH, PEERS, Manifest
from server.transfer.protocol import Done

_PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PHASES = {
    "decode": ("admission", "reserve", "queued", "prefill", "transfer", "verify"),
    "prefill": ("queued", "prefill", "digest", "transfer", "commit"),
}
"""Of ``pd_phase_seconds``, by role."""
DROPPED = (
    "garbage", "corrupt", "malformed", "oversize", "version", "direction", "stale", "refused", "error",
)  # fmt: skip
"""Of ``pd_control_frames_dropped_total``; docs/protocol.md says what they are."""
HANDSHAKES = ("key", "mechanism", "address", "protocol", "broken_off")
"""Of ``pd_control_handshakes_refused_total``."""


OF_SLOTS: tuple[ItemState, ...] = tuple(
    state for state in ItemState if state not in (ItemState.SHARED, ItemState.CACHED)
)
"""Only pages are shared, or cached."""


class NodeMetrics:
    """One set of names for both nodes: a decode node counts what it committed, a prefill node what it sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._known_peers: set[str] = set()
        self._bytes = Counter(
            "pd_transfer_bytes", "State bytes transferred, by component.", ["component"], registry=registry
        )
        self._pieces = Counter("pd_transfer_pieces", "Contiguous writes that carried them.", registry=registry)
        self._peer_bytes = Counter(
            "pd_peer_transfer_bytes", "State bytes transferred, by the other node.", ["peer"], registry=registry
        )
        self._peer_pieces = Counter(
            "pd_peer_transfer_pieces", "Contiguous writes, by the other node.", ["peer"], registry=registry
        )
        self._peer_seconds = Counter(
            "pd_peer_transfer_seconds",
            "Time in which a room's writes were under way, by the other node. Bytes by it are the speed.",
            ["peer"],
            registry=registry,
        )
        self._speed = Gauge(
            "pd_kv_transfer_speed_gb_s",
            "Speed of the last room's transfer in GB/s, by the other node.",
            ["peer"],
            registry=registry,
        )
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
        self._prompt_logprobs = Counter(
            "pd_prompt_logprobs",
            "Log probabilities of prompt tokens, alternatives included, computed here or handed over to here.",
            registry=registry,
        )
        self._quarantine = Gauge(
            "pd_quarantine_oldest_seconds",
            "For how long the oldest room waits for its prefill node's writes to end.",
            registry=registry,
        )
        self._slots = Gauge("pd_slots", "Request slots, by state.", ["state"], registry=registry)
        self._pages = Gauge("pd_pages", "KV pages, by state.", ["state"], registry=registry)
        self._queued = Gauge("pd_num_requests_waiting", "Requests waiting for a slot and pages.", registry=registry)
        self._running = Gauge("pd_num_requests_running", "Requests that hold a slot.", registry=registry)
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

        self._reused = Counter(
            "pd_prefix_reused_tokens",
            "Prompt tokens that were not computed: their state was in the prefill node's cache.",
            registry=registry,
        )
        self._held = Counter(
            "pd_prefix_held_bytes",
            "State bytes that were not transferred, because the decode node held the same, by the other node.",
            ["peer"],
            registry=registry,
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
        for gauge, kind, states in ((self._slots, "slots", OF_SLOTS), (self._pages, "pages", tuple(ItemState))):
            for state in states:
                gauge.labels(state.value).set_function(partial(_count, allocator, kind, state))
        self._queued.set_function(queued)
        self._running.set_function(running)
        self._peers.set_function(peers)
        self._quarantine.set_function(quarantine_s)

    def watch_prefix(self, cache: PrefixCache) -> None:
        """Adds what the cache of prefixes counts and keeps, read whenever the metrics are scraped."""
        self.registry.register(_PrefixMetrics(cache))

    def expect(self, role: str, components: Sequence[str]) -> None:
        """Every series that the node of ``role`` may have exists from now on: a graph that has none shows a mistake."""
        for component in components:
            self._bytes.labels(component)
            for check in (*Check, PLACEMENT):
                self._checks.labels(check, component)
        for state in OF_SLOTS:
            self._slots.labels(state.value)
        for state in ItemState:
            self._pages.labels(state.value)
        self._rooms.labels("committed", "")
        self._rooms.labels("aborted", "aborted")
        for code, kind in KINDS.items():
            if code != "aborted":
                self._rooms.labels("failed", code)
            if kind.may_be_retried and role == "decode":
                self._retries.labels(code)
        for phase in PHASES[role]:
            self._phase.labels(phase)
        for reason in DROPPED:
            self._dropped.labels(reason)
        for field in (AUTH, PEERS, "other", *(field.name for field in msgspec.structs.fields(Manifest))):
            self._refusals.labels(field)
        for reason in HANDSHAKES if role == "prefill" else ():
            self._handshakes.labels(reason)

    def peer_known(self, peer: str) -> None:
        """``peer`` is registered, or may be: it has its series from now on."""
        self._known_peers.add(peer)
        for metric in self._of_peer:
            metric.labels(peer)

    def peer_gone(self, peer: str) -> None:
        """It will never come back."""
        self._known_peers.discard(peer)
        for metric in self._of_peer:
            metric.remove(peer)

    def transferred(self, peer: str, done: Done) -> None:
        """A room's whole state went to, or came from, ``peer``."""
        nbytes, n_pieces, writing_s = 0, sum(done.pieces.values()), done.timings.writing_s
        for sent in done.sent:
            self._bytes.labels(sent.component).inc(sent.nbytes)
            nbytes += sent.nbytes
        self._pieces.inc(n_pieces)
        if peer not in self._known_peers:
            return  # it is gone; its series must not come back
        self._peer_bytes.labels(peer).inc(nbytes)
        self._peer_pieces.labels(peer).inc(n_pieces)
        self._peer_seconds.labels(peer).inc(writing_s)
        if writing_s:
            self._speed.labels(peer).set(nbytes / writing_s / 1e9)

    def reused(self, n_tokens: int) -> None:
        """So many tokens of a prompt are taken from the cache instead of computed."""
        self._reused.inc(n_tokens)

    def held(self, peer: str, nbytes: int) -> None:
        """So many bytes of a room's state need not be transferred, to or from ``peer``."""
        if peer in self._known_peers:
            self._held.labels(peer).inc(nbytes)

    def moved(self) -> dict[str, Any]:
        """What was transferred so far: ``nbytes`` by component, ``pieces``, and the same of each of the ``peers``."""
        nbytes, pieces, seconds = (_values(m) for m in (self._peer_bytes, self._peer_pieces, self._peer_seconds))
        return {
            "nbytes": {component: int(n) for component, n in _values(self._bytes).items()},
            "pieces": int(_values(self._pieces)[""]),
            "peers": [
                {
                    "peer": peer,
                    "nbytes": int(nbytes[peer]),
                    "pieces": int(pieces[peer]),
                    "gb_s": nbytes[peer] / seconds[peer] / 1e9 if seconds[peer] else None,
                }
                for peer in nbytes
            ],
        }

    @property
    def _of_peer(self) -> tuple[Counter | Gauge, ...]:
        return self._peer_bytes, self._peer_pieces, self._peer_seconds, self._speed, self._held

    def room_ended(self, outcome: str, reason: str) -> None:
        self._rooms.labels(outcome, reason).inc()

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def prompt_logprobs(self, count: int) -> None:
        self._prompt_logprobs.inc(count)

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


class _PrefixMetrics(Collector):
    """What a cache of prefixes counts and keeps, as it is when it is read."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        cache, counts = self._cache, self._cache.counts
        yield CounterMetricFamily(
            "pd_prefix_prompt_tokens", "Tokens of prompts that were looked up in the cache.", counts.looked_up
        )
        evicted = CounterMetricFamily(
            "pd_prefix_evicted", "What left the cache to make room, by what it was.", labels=["what"]
        )
        evicted.add_metric(["page"], counts.evicted_pages)
        evicted.add_metric(["snapshot"], counts.evicted_snapshots)
        yield evicted
        yield CounterMetricFamily(
            "pd_prefix_damaged", "Pages and snapshots of the cache that were not what was put there.", counts.damaged
        )
        yield GaugeMetricFamily("pd_prefix_cached_pages", "Pages in the cache, read or not.", len(cache))
        yield GaugeMetricFamily("pd_prefix_snapshots", "Snapshots in the cache.", cache.n_snapshots)
        yield GaugeMetricFamily("pd_prefix_snapshot_bytes", "Bytes of these snapshots.", cache.held_nbytes)


def _values(counter: Counter) -> dict[str, float]:
    """What a counter with one label, or none, has counted, by that label's value."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def _count(allocator: Allocator, kind: str, state: ItemState) -> float:
    return allocator.counts()[kind][state]
