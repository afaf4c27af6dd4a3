"""Traces of real nodes, as a collector gets them."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry

from server.failure import RequestFailed
from server.telemetry.record import PhaseName
from server.telemetry.rooms import DECODE, RoomRecords
from server.telemetry.trace_context import TraceSpan, parse_traceparent, span_below
from server.telemetry.traces import MAX_WAITING, TraceExporter, traces_url
from tests.nodes.support import NodeUnderTest, answer, pairs, request
from tests.support.waiting import until

CALLER = TraceSpan("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", None, sampled=True)


@dataclass
class Collector:
    """An HTTP server that keeps the spans that it is sent. ``may_answer`` holds its answers back."""

    spans: list[tuple[str, Any]] = field(default_factory=list)
    """With the name of the service that sent it."""
    may_answer: Event = field(default_factory=Event)
    url: str = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def named(self, service: str, name: str) -> Any:
        (found,) = [span for s, span in self.spans if s == service and span.name == name]
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.may_answer.wait(60)
            if self.path == "/v1/traces":
                collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            collector.may_answer.set()
            server.shutdown()
            thread.join()


def exporter(url: str, role: str, registry: CollectorRegistry | None = None) -> TraceExporter:
    return TraceExporter(url, role, f"the {role} node", registry or CollectorRegistry())


def ids(span: Any) -> tuple[str, str]:
    return span.trace_id.hex(), span.parent_span_id.hex()


async def test_one_trace_goes_over_client_decode_and_prefill_node() -> None:
    with collecting() as collector:
        async with pairs() as pair:
            p = await pair.prefill(traces=exporter(collector.url, "prefill"))
            d = await pair.decode(p, traces=exporter(collector.url, "decode"))
            await answer(d.node, replace(request(300), traceparent=CALLER.traceparent))
            await until(lambda: len(p.node.rooms(9).ended) == 1)
        # both nodes have ended: what waited has gone out
        asked, computed = collector.named("dsv4-pd-decode", "request"), collector.named("dsv4-pd-prefill", "request")
    assert ids(asked) == (CALLER.trace_id, CALLER.span_id)
    assert ids(computed) == (CALLER.trace_id, asked.span_id.hex())
    assert {span.trace_id.hex() for _, span in collector.spans} == {CALLER.trace_id}

    def below(span: Any) -> list[Any]:
        return [other for _, other in collector.spans if other.parent_span_id == span.span_id and other is not computed]

    own = [s for s in below(asked) if s.span_id != computed.span_id]
    assert [s.name for s in own] == ["receive", "queue", "reserve", "done", "verify", "first_token", "decode"]
    assert [s.name for s in below(computed)] == ["prefill_queue", "prefill", "transfer", "commit"]
    for span, parts in ((asked, own), (computed, below(computed))):
        assert parts[0].start_time_unix_nano == span.start_time_unix_nano
        assert parts[-1].end_time_unix_nano == span.end_time_unix_nano
    attributes = {a.key: a.value for a in asked.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 300
    assert attributes["pd.outcome"].string_value == "length"


async def test_a_request_of_nobody_begins_a_trace_and_a_failed_one_is_an_error() -> None:
    with collecting() as collector:
        async with pairs() as pair:
            p = await pair.prefill(traces=exporter(collector.url, "prefill"), faults=("drop:swa",))
            d = await pair.decode(p, traces=exporter(collector.url, "decode"))
            with pytest.raises(RequestFailed):
                await answer(d.node, request(20))
        asked = collector.named("dsv4-pd-decode", "request")
    assert asked.parent_span_id == b""
    assert asked.status.code == asked.status.STATUS_CODE_ERROR
    assert {a.key: a.value.string_value for a in asked.attributes}["pd.component"] == "swa"


async def test_what_the_caller_does_not_sample_is_not_sent() -> None:
    unsampled = replace(CALLER, sampled=False).traceparent
    registry = CollectorRegistry()
    with collecting() as collector:
        async with pairs() as pair:
            d = await pair.decode(local=True, traces=exporter(collector.url, "decode", registry))
            await answer(d.node, replace(request(20), traceparent=unsampled))
            await answer(d.node, request(21))
        spans = [span for _, span in collector.spans if span.name == "request"]
    assert len(spans) == 1
    assert spans[0].trace_id.hex() != CALLER.trace_id


async def test_without_tracing_the_callers_span_is_handed_on() -> None:
    with collecting() as collector:
        async with pairs() as pair:
            p = await pair.prefill(traces=exporter(collector.url, "prefill"))
            d = await pair.decode(p)
            await answer(d.node, replace(request(20), traceparent=CALLER.traceparent))
            assert d.node.rooms(1).ended[0].trace_id == CALLER.trace_id
            await until(lambda: len(p.node.rooms(9).ended) == 1)
        assert ids(collector.named("dsv4-pd-prefill", "request")) == (CALLER.trace_id, CALLER.span_id)


def traced_rooms(registry: CollectorRegistry, outcome: str) -> float:
    return registry.get_sample_value("pd_traced_rooms_total", {"outcome": outcome}) or 0.0


async def test_a_collector_that_does_not_answer_costs_nothing_but_its_traces() -> None:
    registry = CollectorRegistry()
    with collecting() as collector:
        collector.may_answer.clear()
        sink = exporter(collector.url, "decode", registry)
        sink.start()
        records = RoomRecords(DECODE, 8, lambda: 100.0, sink)
        for i in range(MAX_WAITING + 200):
            record = records.open(i, "r", n_prompt=1, max_new=1, first=PhaseName.RECEIVE)
            records.end(record, "stop", 101.0)
        assert traced_rooms(registry, "dropped") > 0
        collector.may_answer.set()
        closing = asyncio.create_task(asyncio.to_thread(sink.close))
        await closing
        await until(lambda: traced_rooms(registry, "exported") + traced_rooms(registry, "dropped") == MAX_WAITING + 200)


@contextmanager
def endless_answer() -> Iterator[str]:
    """A collector whose answer has a head, and then a body without an end."""
    is_over = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(ConnectionError):
                while not is_over.wait(0.001):
                    self.wfile.write(b"x" * 4096)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            is_over.set()
            server.shutdown()
            thread.join()


async def test_of_an_answer_without_an_end_nothing_is_kept() -> None:
    registry = CollectorRegistry()
    with endless_answer() as url:
        sink = exporter(url, "decode", registry)
        sink.start()
        records = RoomRecords(DECODE, 8, lambda: 100.0, sink)
        for i in range(2):
            records.end(records.open(i, "r", n_prompt=1, max_new=1, first=PhaseName.RECEIVE), "stop", 101.0)
            await until(lambda i=i: traced_rooms(registry, "exported") == i + 1)  # type: ignore[misc]
        sink.close()


async def test_a_collector_that_is_not_there_does_not_keep_a_node_from_its_work(
    unused_tcp_port: int,
) -> None:
    async with pairs() as pair:
        node: NodeUnderTest = await pair.decode(
            local=True, traces=exporter(f"http://127.0.0.1:{unused_tcp_port}", "decode")
        )
        for i in range(3):
            await answer(node.node, request(20, seed=i))
    assert [r.outcome for r in node.node.rooms(9).ended] == ["length"] * 3


@pytest.mark.parametrize(
    ("header", "is_taken"),
    [
        (CALLER.traceparent, True),
        (CALLER.traceparent.upper(), True),
        ("cc" + CALLER.traceparent[2:] + "-more", True),
        (CALLER.traceparent + "-more", False),
        ("ff" + CALLER.traceparent[2:], False),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", False),
        (f"00-{CALLER.trace_id}-{'0' * 16}-01", False),
        ("garbage", False),
        ("", False),
        (None, False),
    ],
)
def test_the_header_is_taken_as_w3c_says(header: str | None, is_taken: bool) -> None:
    assert parse_traceparent(header) == (CALLER if is_taken else None)


def test_a_span_below_another_is_of_its_trace() -> None:
    below = span_below(CALLER)
    assert (below.trace_id, below.parent_id, below.sampled) == (CALLER.trace_id, CALLER.span_id, True)
    assert parse_traceparent(span_below(None).traceparent) is not None


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/tenant/traces", "https://a/tenant/traces"),
    ],
)
def test_the_path_that_otlp_says_is_added(url: str, meant: str) -> None:
    assert traces_url(url) == meant
