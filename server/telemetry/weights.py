"""Metrics of weights that stay in the files of their checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


def watch_weights(registry: CollectorRegistry, state: Callable[[], Mapping[str, Any]]) -> None:
    """Adds the metrics of packed weights to ``registry``, read from ``state`` (the fields of
    :class:`server.model.interface.WeightsState`) whenever they are scraped.
    """
    registry.register(_Weights(state))


class _Weights(Collector):
    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        now = self._state()
        for name, text, value in (
            ("budget", "Most bytes of packed weights in memory.", now["budget_nbytes"]),
            ("resident", "Bytes of packed weights in memory.", now["loaded_nbytes"] + now["resident_nbytes"]),
        ):
            yield GaugeMetricFamily(f"pd_weights_{name}_bytes", text, value)
        for name, text, value in (
            (
                "read_bytes",
                "Bytes of packed weights that came into memory, from disk or its cache.",
                now["read_nbytes"],
            ),
            ("hits", "Pieces of packed weights that were in memory when they were needed.", now["hits"]),
            ("misses", "Pieces of packed weights that had to be read.", now["misses"]),
            ("evictions", "Pieces of packed weights that left memory for others.", now["evictions"]),
        ):
            yield CounterMetricFamily(f"pd_weights_{name}", text, value)
