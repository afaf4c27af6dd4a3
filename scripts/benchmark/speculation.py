"""Time per output token with k draft tokens against plain decoding: the bundled questions, asked of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

from evaluation.questions import STOP, bundled_questions

from .client import ask_all, run_client
from .measurement import BenchFailed, Measurement
from .servers import Server, decode_node, node_options, prefill_node, running
from .session import Session

AT_ONCE = (1, 8)
MOST_TOKENS = 64


def measure_speculation(session: Session) -> Iterator[Measurement]:
    """One prefill node, and a decode node for every k. ``details`` have the accept length of each."""
    prompts = [prompt for _, prompt in bundled_questions()[: session.sizes.questions]]
    options = node_options(session, "bundled", pages=128, slots=16)
    prefill = prefill_node("speculation", options)
    names = {k: f"k = {k}" for k in range(session.sizes.most_drafts + 1)}
    nodes = {
        name: Server(decode_node(f"speculation-{k}", prefill, (*options, "--spec-tokens", str(k))))
        for k, name in names.items()
    }
    with running({"prefill": Server(prefill), **nodes}):
        for at_once in AT_ONCE:
            lengths: dict[str, float] = {}
            m = Measurement(
                "speculation",
                f"time per output token, bundled questions, {at_once} at once",
                "ms",
                tuple((name, names[0]) for k, name in names.items() if k),
                size={"checkpoint": "bundled", "requests": at_once, "questions": len(prompts)},
                details={"accept_length": lengths},
            )
            yield session.measure(m, partial(_round, nodes, prompts, at_once, lengths))


def _round(
    nodes: dict[str, Server], prompts: Sequence[str], at_once: int, lengths: dict[str, float], m: Measurement
) -> None:
    for name, node in nodes.items():
        times_s, n_steps, n_accepted = [], 0, 0
        for i in range(0, len(prompts), at_once):
            for stream, usage in run_client(ask_all(node.url, prompts[i : i + at_once], MOST_TOKENS, STOP)):
                if stream.n_tokens > stream.counts[0]:
                    times_s.append((stream.times_s[-1] - stream.times_s[0]) / (stream.n_tokens - stream.counts[0]))
                drafts = usage.get("completion_tokens_details") or {}
                n_steps += drafts.get("draft_steps", 0)
                n_accepted += drafts.get("accepted_prediction_tokens", 0)
        if not times_s:
            raise BenchFailed(f"{name}: no answer has two tokens")
        m.add(name, 1e3 * median(times_s))
        lengths[name] = 1 + n_accepted / n_steps if n_steps else 1.0
