"""How well the draft does, in metrics: accept lengths over all steps, and apart for the first tokens after a
hand-over.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.engine.request import TokenOutput

EARLY_TOKENS = 32
"""A draft that lost its window recovers within a window's length: its loss shows in the first tokens of an answer."""


class DraftMetrics:
    """Accept length of a step is the number of tokens that it gave out: 1 + accepted draft tokens.

    ``spec_tokens`` is k, ``draft_state`` where windows come from.
    """

    def __init__(self, registry: CollectorRegistry, spec_tokens: int, draft_state: str) -> None:
        buckets = [float(n) for n in range(1, spec_tokens + 2)]
        self._length = Histogram(
            "pd_accept_length", "Tokens that a step gave out: 1 + accepted drafts.", buckets=buckets, registry=registry
        )
        self._early = Histogram(
            "pd_accept_length_early",
            f"The same, over the steps of the first {EARLY_TOKENS} tokens of an answer.",
            buckets=buckets,
            registry=registry,
        )
        self._steps = [0] * (spec_tokens + 1)
        self._tokens = Counter("pd_draft_tokens", "Drafted tokens, by outcome.", ["outcome"], registry=registry)
        self._position = Counter(
            "pd_draft_accepted_at",
            "Accepted draft tokens, by their place in the draft (1 is the first).",
            ["position"],
            registry=registry,
        )
        for outcome in ("proposed", "accepted"):
            self._tokens.labels(outcome)
        for place in range(1, spec_tokens + 1):
            self._position.labels(str(place))
        info = Gauge("pd_draft_state", "Where the draft's window comes from (always 1).", ["mode"], registry=registry)
        info.labels(draft_state).set(1)

    def lengths(self) -> dict[str, int]:
        """How many steps gave out how many tokens."""
        return {str(length): n for length, n in enumerate(self._steps, 1)}

    def step(self, output: TokenOutput, n_before: int) -> None:
        """Counts one step of a request that had generated ``n_before`` tokens. Steps without drafts do not count."""
        if not output.n_proposed:
            return
        length = 1 + output.n_accepted
        self._length.observe(length)
        self._steps[length - 1] += 1
        if n_before < EARLY_TOKENS:
            self._early.observe(length)
        self._tokens.labels("proposed").inc(output.n_proposed)
        self._tokens.labels("accepted").inc(output.n_accepted)
        for position in range(1, output.n_accepted + 1):
            self._position.labels(str(position)).inc()
