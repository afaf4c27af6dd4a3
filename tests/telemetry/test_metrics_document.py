"""``docs/metrics.md`` is made from the metrics: ``python -m tests.telemetry.test_metrics_document`` writes it anew.

The Grafana dashboard may ask for nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, enable_created_metrics
from prometheus_client.core import Metric

from server.api.http_connections import ConnectionManager
from server.api.http_limits import HttpLimits
from server.api.middleware import response_counter
from server.cache.allocator import Allocator
from server.cache.layout import ArenaLayout
from server.cache.owners import OwnerStamps
from server.cache.prefix import PrefixCache
from server.decode.draft_metrics import DraftMetrics
from server.model.interface import WeightsState
from server.telemetry.latency import RequestMetrics
from server.telemetry.traces import TraceExporter
from server.telemetry.weights import watch_weights
from server.transfer.metrics import NodeMetrics
from tests.nodes.support import Pair, answer, pairs, request
from tests.transfer.support import make_geometry

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "docker" / "grafana" / "dashboard.json"
ROLES = ("prefill", "decode")
SAME_AS = {
    "pd_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "pd_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "pd_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "pd_request_queue_time_seconds": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "pd_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "pd_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "pd_prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
    "pd_generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "pd_num_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "pd_num_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "pd_request_success": ("vllm:request_success",),
    "pd_kv_transfer_speed_gb_s": ("sglang:kv_transfer_speed_gb_s",),
}
"""Metrics of others that mean the same as ours."""
HEAD = """# Metrics

Written by `python -m tests.telemetry.test_metrics_document`; a test compares.

`GET /metrics` answers in Prometheus' text format, or in OpenMetrics where the header `Accept` names
`application/openmetrics-text`; then TTFT and whole requests have the room as an exemplar. It needs no API key. Every
series exists from the start of the node; those of a peer from its registration until it is lost, and the metrics that
belong to an option (drafts: `--spec-tokens`, traces: `--otlp`, weights: `--weights packed`; `pd_prefix_` ones, but for
`--prefix-cache off`) with that option.
`docker/grafana/dashboard.json` draws them.

Where vLLM or SGLang have a metric that means the same, its name without the prefix is the one here: `pd_` takes the
place of `vllm:`. As in vLLM, inter-token latency counts the outputs of steps, however many tokens they have. There is
no label `model_name`: a node serves one model (`/v1/models`).

Counters have `_total` behind their names, infos `_info`, histograms `_bucket`, `_sum` and `_count`.

| metric | type | labels | node | like | |
|---|---|---|---|---|---|
"""


def no_prefixes() -> PrefixCache:
    geometry = make_geometry()
    return PrefixCache(Allocator(geometry), OwnerStamps(ArenaLayout.from_geometry(geometry)), (), geometry.page_size)


def registry_of(role: str) -> CollectorRegistry:
    """Everything that a node of ``role`` may show."""
    registry = CollectorRegistry()
    metrics = NodeMetrics(registry)
    metrics.expect(role, ["swa"])
    metrics.peer_known("peer")
    metrics.show_kernels("cpu", "why")
    metrics.watch_prefix(no_prefixes())
    watch_weights(registry, lambda: asdict(WeightsState()))
    RequestMetrics(registry, role)
    if role == "decode":
        DraftMetrics(registry, 3, "transfer")
    ConnectionManager(HttpLimits(), registry)
    response_counter(registry).labels(route="/v1/completions", status=200)
    TraceExporter("http://127.0.0.1:4318", role, role, registry)
    return registry


def families(registry: CollectorRegistry) -> Iterator[Metric]:
    """But for those that say when something was created, which the nodes switch off."""
    disable_created_metrics()
    try:
        yield from registry.collect()
    finally:
        enable_created_metrics()


def labels_of(metric: Metric) -> list[str]:
    return sorted({label for sample in metric.samples for label in sample.labels} - {"le"})


def document() -> str:
    rows: dict[str, list[Any]] = {}
    for role in ROLES:
        for metric in families(registry_of(role)):
            row = rows.setdefault(metric.name, [metric.type, labels_of(metric), [], metric.documentation])
            row[1] = sorted({*row[1], *labels_of(metric)})
            row[2].append(role)
    lines = []
    for name, (kind, labels, roles, words) in sorted(rows.items()):
        like = ", ".join(f"`{other}`" for other in SAME_AS.get(name, ()))
        named = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {kind} | {named} | {' and '.join(roles)} | {like} | {words} |")
    return HEAD + "\n".join(re.sub(r"\|  \|", "| |", line) for line in lines) + "\n"


def test_the_document_has_every_metric_as_it_is_shown() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_names_are_those_of_vllm_where_it_has_one() -> None:
    names = {metric.name for role in ROLES for metric in families(registry_of(role))}
    assert set(SAME_AS) <= names
    for ours, others in SAME_AS.items():
        for other in others:
            prefix, _, stem = other.partition(":")
            assert prefix != "vllm" or stem == ours.removeprefix("pd_")


async def test_a_real_pair_shows_nothing_else_and_no_series_is_born_by_a_request() -> None:
    documented = {role: {metric.name for metric in families(registry_of(role))} for role in ROLES}
    async with pairs() as pair:
        before, nodes = await _pair(pair)
        await answer(nodes[1].node, request(300))
        for role, node in zip(ROLES, nodes, strict=True):
            assert {metric.name for metric in families(node.parts.metrics.registry)} <= documented[role]
            assert _series(node.parts.metrics.registry) == before[role]


async def _pair(pair: Pair) -> tuple[dict[str, set[Any]], list[Any]]:
    p = await pair.prefill()
    d = await pair.decode(p)
    nodes = [p, d]
    return {role: _series(node.parts.metrics.registry) for role, node in zip(ROLES, nodes, strict=True)}, nodes


def _series(registry: CollectorRegistry) -> set[Any]:
    return {(s.name, *sorted(s.labels.items())) for metric in families(registry) for s in metric.samples}


def queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    variables = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return variables + [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("query", queries())
def test_the_dashboard_asks_for_what_there_is(query: str) -> None:
    """Names and labels."""
    samples: dict[str, set[str]] = {}
    for role in ROLES:
        for metric in families(registry_of(role)):
            for sample in metric.samples:
                samples.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    named = re.findall(r"pd_\w+", query)
    assert named
    assert [name for name in named if name not in samples] == []
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    for name in named:
        assert grouped <= samples[name], name


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
