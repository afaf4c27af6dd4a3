"""The hand-off of one prompt's state against one raw write of as many bytes by Mooncake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from statistics import median

from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry, Scope
from server.model.config import load_config
from server.model.state import state_components

from .client import ttft_s
from .measurement import BenchFailed, Measurement, Prompt
from .raw_write import RawWriter
from .servers import BASELINE, HAND_OFF_PHASES, PD, Server, a_pair, bundled_servers, node_options, running
from .session import Pace, Session

HAND_OFF, RAW_WRITE = "hand-off", "raw write"
PAGE_SIZE, MARGIN_TOKENS = 256, 512
RAW_WRITES_A_ROUND = 5
"""A write takes a fraction of a millisecond: each round takes the median of several."""
SHORT_PROMPT = 64
PATIENCE = 8
"""Times --seconds for one prompt: a long one is measured once rather than not at all."""


def measure_handoff(session: Session) -> Iterator[Measurement]:
    """``hand-off``: from the end of the prompt's last forward to the commit, as the prefill node measures it."""
    servers = bundled_servers(session)
    yield from _measure(session, "bundled", session.sizes.handoff, _renamed(servers), session.sizes.seconds)
    lengths = session.sizes.flash
    options = node_options(session, "flash", pages=-(-(max(lengths) + MARGIN_TOKENS) // PAGE_SIZE), slots=2)
    pairs = {PD: a_pair("flash-pair", options)}
    if session.baseline is not None:
        pairs[PD + BASELINE] = a_pair("flash-baseline-pair", options, session.baseline)
    with running(pairs):
        yield from _measure(session, "flash", lengths, _renamed(pairs), PATIENCE * session.sizes.seconds)


def _renamed(servers: dict[str, Server]) -> dict[str, Server]:
    """The pairs among ``servers``, by what is measured of them."""
    return {HAND_OFF + name.removeprefix(PD): server for name, server in servers.items() if server.prefill is not None}


def _measure(
    session: Session, checkpoint: str, lengths: Sequence[int], pairs: dict[str, Server], limit_s: float
) -> Iterator[Measurement]:
    layout, pace = _layout(session, checkpoint), Pace(limit_s)
    for name, pair in pairs.items():
        prompt = session.prompts.one(SHORT_PROMPT)
        pace.took(name, SHORT_PROMPT, min(ttft_s(pair.url, prompt) for _ in range(2)))
    with closing(RawWriter(max(sum(layout.live_nbytes(n).values()) for n in lengths))) as raw:
        for n in lengths:
            nbytes = sum(layout.live_nbytes(n).values())
            m = Measurement(
                "handoff",
                f"hand-off, {checkpoint}, {n:,} tokens",
                "ms",
                ((HAND_OFF, RAW_WRITE), (HAND_OFF, HAND_OFF + BASELINE)),
                size={"checkpoint": checkpoint, "tokens": n, "nbytes": nbytes},
                details={"most_pieces": most_pieces(layout, n)},
            )
            possible = pace.possible(m, pairs, n)
            if possible:
                session.measure(m, partial(_round, possible, raw, session.prompts.one(n), nbytes, pace))
            yield m


def _round(pairs: dict[str, Server], raw: RawWriter, prompt: Prompt, nbytes: int, pace: Pace, m: Measurement) -> None:
    for name, pair in pairs.items():
        found = pair.hand_off(prompt, nbytes)
        pace.took(name, len(prompt), found.ttft_s)
        m.add(name, 1e3 * sum(found.phases_s.get(phase, 0.0) for phase in HAND_OFF_PHASES))
        for phase in HAND_OFF_PHASES:
            m.add(f"{name}: {phase}", 1e3 * found.phases_s.get(phase, 0.0))
        if found.pieces > (most := m.details["most_pieces"]):
            raise BenchFailed(f"{name}: {found.pieces} writes for {len(prompt)} tokens, at most {most} are right")
        m.details[f"pieces, {name}"] = found.pieces
    m.add(RAW_WRITE, 1e3 * median(raw.write_s(nbytes) for _ in range(RAW_WRITES_A_ROUND)))


def most_pieces(layout: ArenaLayout, n: int) -> int:
    """Writes that a prompt of ``n`` tokens may take (docs/layout.md). Every full page may be a run of its own: its
    neighbours are sent after other chunks.
    """
    rings = sum(c.scope is Scope.SLOT for c in layout.components) - 1  # the hand-off row is none
    return n // layout.page_size + 3 + 3 * rings + 1


def _layout(session: Session, checkpoint: str) -> ArenaLayout:
    """Of what a prefill node hands over without a draft (only the sizes of rows matter here)."""
    config = load_config(session.checkpoints.path(checkpoint))
    components = state_components(config, "float32")
    return ArenaLayout.from_geometry(CacheGeometry(PAGE_SIZE, 2, 2, config.sliding_window, 0, components))
