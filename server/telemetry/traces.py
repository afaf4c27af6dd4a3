"""OpenTelemetry traces: each record becomes a span and one below it for each phase, when its room is over.

Records wait in a bounded queue for a thread of this file's own, which makes the spans and sends them to the collector.
So neither a request nor the event loop ever waits for it: what the queue cannot take is dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter

from server.telemetry.record import Phase, RoomRecord
from server.telemetry.rooms import RoomRecorder
from server.telemetry.trace_context import TraceSpan

if TYPE_CHECKING:
    import requests
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

MAX_WAITING = 1024
MAX_BATCH = 64
"""Rooms whose spans go in one message."""
EXPORT_S = 5.0
CLOSE_S = 2.0
_TRACES_PATH = "/v1/traces"


def traces_url(url: str) -> str:
    """Where a collector at ``url`` takes traces: at the path that OTLP says, unless the URL has one."""
    return url.rstrip("/") + _TRACES_PATH if urlsplit(url).path in ("", "/") else url


class TraceExporter:
    """Takes the records of a node of ``role``, named ``instance``, for the collector at ``url`` (OTLP over HTTP)."""

    def __init__(self, url: str, role: str, instance: str, registry: CollectorRegistry) -> None:
        self._url, self._role, self._instance = url, role, instance
        self._waiting: queue.Queue[tuple[RoomRecorder, TraceSpan] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._rooms = Counter(
            "pd_traced_rooms", "Rooms whose spans the collector took, or that were dropped.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self._is_failing = False
        for outcome in ("exported", "dropped"):
            self._rooms.labels(outcome)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Gives what waits :data:`CLOSE_S` to go out."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=CLOSE_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def __call__(self, recorder: RoomRecorder) -> None:
        """Takes a record that is over, if its trace is sampled. Never waits."""
        span = recorder.span
        if span is None or not span.sampled:
            return
        try:
            self._waiting.put_nowait((recorder, span))
        except queue.Full:
            self._rooms.labels("dropped").inc()

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # said here, once
            exporter = OTLPSpanExporter(traces_url(self._url), timeout=EXPORT_S, session=_session_without_bodies())
            maker = SpanMaker(self._role, self._instance)
        except Exception:
            log.exception("traces cannot be exported")
            return
        for batch in self._batches():
            try:
                self._export(exporter, maker, batch)
            except Exception:
                log.exception("the traces of %d rooms could not be exported", len(batch))
                self._rooms.labels("dropped").inc(len(batch))
        exporter.shutdown()  # type: ignore[no-untyped-call]

    def _batches(self) -> Iterator[list[tuple[RoomRecorder, TraceSpan]]]:
        """What waits, as it comes, until the end."""
        while (item := self._waiting.get()) is not None:
            batch = [item]
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                if (item := self._waiting.get()) is None:
                    yield batch
                    return
                batch.append(item)
            yield batch

    def _export(
        self, exporter: SpanExporter, maker: SpanMaker, batch: Sequence[tuple[RoomRecorder, TraceSpan]]
    ) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for recorder, room_span in batch for span in maker.spans(recorder.read(), room_span)]
        is_taken = exporter.export(spans) is SpanExportResult.SUCCESS
        self._rooms.labels("exported" if is_taken else "dropped").inc(len(batch))
        if is_taken is self._is_failing:
            self._is_failing = not is_taken
            if is_taken:
                log.info("the collector at %s takes traces again", self._url)
            else:
                log.warning("the collector at %s does not take traces: they are dropped until it does", self._url)


def _session_without_bodies() -> requests.Session:
    """Looks at the heads of answers only: the body of one that never ends would be kept in memory, for ever."""
    import requests

    session = requests.Session()
    session.stream = True
    session.hooks["response"].append(lambda response, **_: response.close())
    return session


class SpanMaker:
    """Makes finished spans from records, by the library's own tracer. Lives in one thread."""

    def __init__(self, role: str, instance: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class GivenIds(RandomIdGenerator):
            """The room's span has ids that others know already; those of its phases are drawn."""

            given: TraceSpan | None = None

            def generate_span_id(self) -> int:
                given, self.given = self.given, None
                return super().generate_span_id() if given is None else int(given.span_id, 16)

            def generate_trace_id(self) -> int:
                return super().generate_trace_id() if self.given is None else int(self.given.trace_id, 16)

        class Kept(SpanProcessor):
            """Keeps the spans that have ended."""

            def __init__(self) -> None:
                self.spans: list[ReadableSpan] = []

            def on_end(self, span: ReadableSpan) -> None:
                self.spans.append(span)

        self._ids, self._kept = GivenIds(), Kept()
        resource = Resource.create({"service.name": f"dsv4-pd-{role}", "service.instance.id": instance})
        provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._kept)
        self._tracer = provider.get_tracer("dsv4-pd-server")

    def spans(self, record: RoomRecord, room_span: TraceSpan) -> list[ReadableSpan]:
        """The room's span, with the ids of ``room_span``, and those of the phases that ``record``'s own node measured:
        the prefill node sends its own.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        self._kept.spans = []
        self._ids.given = room_span
        span = self._tracer.start_span(
            "request",
            context=_caller(room_span),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=_ns(record, 0),
        )
        self._ids.given = None
        below = set_span_in_context(span)
        for phase in record.phases:
            if phase.node == record.node:
                self._add_phase(record, phase, below)
        if record.failure is not None:
            span.set_status(Status(StatusCode.ERROR, record.failure.reason))
        span.end(_ns(record, record.total_us or 0))
        return self._kept.spans

    def _add_phase(self, record: RoomRecord, phase: Phase, below: Context) -> None:
        span = self._tracer.start_span(
            phase.name.value, below, attributes={"pd.attempt": phase.attempt}, start_time=_ns(record, phase.start_us)
        )
        span.end(_ns(record, phase.start_us if phase.end_us is None else phase.end_us))


def _caller(span: TraceSpan) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if span.parent_id is None:
        return Context()
    caller = SpanContext(
        int(span.trace_id, 16), int(span.parent_id, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return set_span_in_context(NonRecordingSpan(caller), Context())


def _attributes(record: RoomRecord) -> dict[str, Any]:
    """Names are OpenTelemetry's where it has them (gen_ai.*), the others begin with ``pd.``."""
    attributes: dict[str, Any] = {
        "pd.room": record.room,
        "pd.node": record.node,
        "pd.outcome": record.outcome or "",
        "pd.attempts": len(record.attempts),
        "gen_ai.response.id": record.request_id,
        "gen_ai.request.max_tokens": record.tokens.max_new,
        "gen_ai.usage.input_tokens": record.tokens.prompt,
        "gen_ai.usage.output_tokens": record.tokens.generated,
    }
    if record.attempts:
        attributes["pd.peer"] = record.attempts[-1].peer
    if record.ttft_us is not None:
        attributes["pd.ttft_s"] = record.ttft_us / 1e6
    if record.transfer is not None:
        attributes["pd.transfer.nbytes"] = sum(record.transfer.nbytes.values())
        attributes["pd.transfer.pieces"] = sum(record.transfer.pieces.values())
    if record.failure is not None:
        attributes["error.type"] = record.failure.code
        if record.failure.component:
            attributes["pd.component"] = record.failure.component
    return attributes


def _ns(record: RoomRecord, us: int) -> int:
    return 1000 * (record.began_unix_us + us)
