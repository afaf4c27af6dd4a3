"""The W3C trace context: which trace a request belongs to, and which span of it is ours."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True)
class TraceSpan:
    """One span: ids in hex. ``parent_id`` is None at the root of a trace. Only what is ``sampled`` is exported."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool

    @property
    def traceparent(self) -> str:
        """For whoever works for this span."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


def parse_traceparent(text: str | None) -> TraceSpan | None:
    """The caller's span; None for a header that is missing or invalid, which then means nothing (as W3C says)."""
    found = _TRACEPARENT.fullmatch((text or "").strip().lower())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceSpan(trace_id, span_id, None, bool(int(flags, 16) & _SAMPLED))


def span_below(caller: TraceSpan | None) -> TraceSpan:
    """A span of our own for what ``caller`` has asked for, in its trace; without one it begins a new trace."""
    span_id = secrets.token_hex(8)
    if caller is None:
        return TraceSpan(secrets.token_hex(16), span_id, None, sampled=True)
    return TraceSpan(caller.trace_id, span_id, caller.span_id, caller.sampled)
