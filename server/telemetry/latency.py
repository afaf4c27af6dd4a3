"""How long requests take, as Prometheus metrics: TTFT, inter-token latency, and each part of a request's way.

Where vLLM and SGLang have a metric that means the same, its name behind the prefix is theirs (docs/metrics.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from server.failure import KINDS, FailureKind
from server.telemetry.record import PhaseName
from server.telemetry.rooms import DECODE, RoomRecorder

REQUEST_BUCKETS_S = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
ABORT = "abort"
FINISHED = ("stop", "length", ABORT)

_PARTS: Mapping[str, Mapping[str, tuple[PhaseName, ...]]] = {
    DECODE: {
        "queue": (PhaseName.QUEUE, PhaseName.PREFILL_QUEUE),
        "prefill": (PhaseName.PREFILL,),
        "transfer": (PhaseName.TRANSFER,),
        "commit": (PhaseName.VERIFY,),
    },
    "prefill": {
        "queue": (PhaseName.PREFILL_QUEUE,),
        "prefill": (PhaseName.PREFILL,),
        "transfer": (PhaseName.TRANSFER,),
        "commit": (PhaseName.COMMIT,),
    },
}
_PART_HELP = {
    "queue": "Time that a request waited for a slot and pages; on a decode node, on both nodes.",
    "prefill": "Time in which a prompt was computed, beside other prompts.",
    "transfer": "Time that the state took to arrive after its prompt was computed.",
    "commit": "Time of the check of what arrived; on a prefill node, until the answer to Done.",
}


class TokenMetrics(Collector):
    """What is counted for every output: plain numbers, which take a tenth of the time of the library's own, and are
    given to it when the metrics are read. Lives in one thread.
    """

    __slots__ = ("_counts", "_inter_token", "_sum_s", "n_generated", "n_prompt")

    def __init__(self, *, inter_token: bool) -> None:
        self.n_prompt = self.n_generated = 0
        self._inter_token = inter_token
        self._counts = [0] * (len(TOKEN_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def next_output(self, n_tokens: int, seconds: float) -> None:
        """An output of a request, ``seconds`` after the one before."""
        self.n_generated += n_tokens
        self._counts[bisect_left(TOKEN_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("pd_prompt_tokens", "Tokens of prompts that were computed.", self.n_prompt)
        yield CounterMetricFamily("pd_generation_tokens", "Tokens that were generated.", self.n_generated)
        if self._inter_token:
            bounds = [*(str(bound) for bound in TOKEN_BUCKETS_S), "+Inf"]
            yield HistogramMetricFamily(
                "pd_inter_token_latency_seconds",
                "Time between two outputs of a request (with drafts one output may have several tokens).",
                buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
                sum_value=self._sum_s,
            )


class RequestMetrics:
    """Made from the records of a node of ``role``. TTFT and end-to-end times have the room as an exemplar."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        is_decode = role == DECODE
        self.tokens = TokenMetrics(inter_token=is_decode)
        registry.register(self.tokens)
        self._of_part = _PARTS[role]
        self._parts = {
            part: _histogram(f"pd_request_{part}_time_seconds", _PART_HELP[part], registry) for part in self._of_part
        }
        self._total = _histogram(
            "pd_e2e_request_latency_seconds",
            "Time from a request's arrival to its end, of those that were answered; on a prefill node to the commit.",
            registry,
        )
        self._ttft: Histogram | None = None
        self._decode: Histogram | None = None
        if is_decode:
            self._ttft = _histogram(
                "pd_time_to_first_token_seconds", "Time from a request's arrival to its first token.", registry
            )
            self._decode = _histogram(
                "pd_request_decode_time_seconds", "Time from the first token to the last one.", registry
            )
        self._success = Counter(
            "pd_request_success",
            "Requests that were answered, or aborted by their clients, by the reason of their end. The client of a "
            "prefill node is the decode node.",
            ["finished_reason"],
            registry=registry,
        )
        self._failures = Counter(
            "pd_request_failures", "Requests that ended with an error, or were refused, by code.", ["code"],
            registry=registry,
        )  # fmt: skip
        self._n_failures: Counts[str] = Counts()
        for reason in FINISHED if is_decode else ("committed", ABORT):
            self._success.labels(reason)
        for code, kind in KINDS.items():
            if kind is not FailureKind.ABORTED:
                self._failures.labels(code)

    def first_token(self, recorder: RoomRecorder, n_tokens: int) -> None:
        """A request of a decode node gives out its first output."""
        ttft_s = recorder.ttft_s()
        if self._ttft is not None and ttft_s is not None:
            self._ttft.observe(ttft_s, {"room": str(recorder.room)})
        self.tokens.n_prompt += recorder.n_prompt
        self.tokens.n_generated += n_tokens
        self._observe_parts(recorder)

    def totals(self) -> dict[str, Any]:
        """``tokens`` so far, and the ``failures`` that there were, by code."""
        return {
            "tokens": {"prompt": self.tokens.n_prompt, "generated": self.tokens.n_generated},
            "failures": dict(self._n_failures),
        }

    def refused(self, code: str) -> None:
        """A request ends with an error, or never gets a room."""
        self._failures.labels(code).inc()
        self._n_failures[code] += 1

    def ended(self, recorder: RoomRecorder) -> None:
        """A request is over."""
        failure, total_s = recorder.failure, recorder.total_s()
        if failure is not None and failure.kind is not FailureKind.ABORTED:
            self.refused(failure.code)
            return
        is_aborted = failure is not None or recorder.outcome == ABORT
        self._success.labels(ABORT if is_aborted else recorder.outcome).inc()
        if is_aborted or total_s is None:
            return
        self._total.observe(total_s, {"room": str(recorder.room)})
        if self._decode is not None and recorder.first_token_at is not None:
            self._decode.observe(recorder.seconds().get(PhaseName.DECODE, 0.0))
        else:  # nothing was said of it before: there was no first token
            self.tokens.n_prompt += recorder.n_prompt
            self.tokens.n_generated += recorder.n_generated
            self._observe_parts(recorder)

    def _observe_parts(self, recorder: RoomRecorder) -> None:
        seconds = recorder.seconds()
        for part, names in self._of_part.items():
            self._parts[part].observe(sum(seconds.get(name, 0.0) for name in names))


def _histogram(name: str, words: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, words, buckets=REQUEST_BUCKETS_S, registry=registry)
