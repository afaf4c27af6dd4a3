"""The proof before a commit: is what lies in this memory, byte for byte, what the prefill node computed?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.cache.arena import Arena
from server.cache.digest import live_digests
from server.cache.handoff import Handoff, prompt_hash, read_handoff
from server.cache.layout import Placement
from server.cache.specs import HANDOFF, LayoutError
from server.engine.request import GenerationRequest, TokenLogprob
from server.transfer.plan import check_coverage
from server.transfer.protocol import Done
from server.transfer.rooms import Failure, RoomKey


@dataclass(frozen=True)
class Proof:
    """How the check ended: a ``failure`` that names the component, or the ``first`` token of a proved hand-off."""

    failure: Failure | None
    first: TokenLogprob | None = None


def verify(
    arena: Arena, placement: Placement, components: Sequence[str], key: RoomKey, request: GenerationRequest, done: Done
) -> Proof:
    """Coverage, byte counts, digests of ``components``, then the hand-off row. Runs in a worker thread."""
    n = len(request.prompt_ids)
    if done.n != n:
        return Proof(_mismatch("", f"Done is for {done.n} tokens, the prompt has {n}"))
    if (gap := check_coverage(done.sent, arena.layout, n, components)) is not None:
        return Proof(_mismatch(gap.component, gap.reason))
    digests = live_digests(arena, n, placement, components)
    for sent in done.sent:
        if sent.digest != digests[sent.component]:
            values = f"the prefill node has {sent.digest:016x}, this memory has {digests[sent.component]:016x}"
            return Proof(_mismatch(sent.component, f"its digest differs: {values}"))
    return _verify_handoff(arena, placement, key, request)


def accept_unchecked(
    arena: Arena, placement: Placement, components: Sequence[str], key: RoomKey, request: GenerationRequest, done: Done
) -> Proof:
    """Fault injection: what a node without :func:`verify` would commit. Only the hand-off row must be readable."""
    row = read_handoff(arena, placement, hc_mult=1)
    return Proof(None, TokenLogprob(row.first_token, row.first_logprob, row.top))


def _verify_handoff(arena: Arena, placement: Placement, key: RoomKey, request: GenerationRequest) -> Proof:
    try:
        row = read_handoff(arena, placement, hc_mult=1)
    except LayoutError as error:
        return Proof(_mismatch(HANDOFF, str(error)))
    difference = _difference(row, key, request)
    if difference is not None:
        return Proof(_mismatch(HANDOFF, difference))
    return Proof(None, TokenLogprob(row.first_token, row.first_logprob, row.top))


def _difference(row: Handoff, key: RoomKey, request: GenerationRequest) -> str | None:
    if (row.room, row.epoch) != (key.room, key.epoch):
        return f"it is of room {row.room} epoch {row.epoch}, expected {key}"
    if row.n != len(request.prompt_ids):
        return f"it is of {row.n} prompt tokens, expected {len(request.prompt_ids)}"
    if row.prompt_hash != prompt_hash(request.prompt_ids):
        return "it is of another prompt: the prompt hash differs"
    return None


def _mismatch(component: str, reason: str) -> Failure:
    return Failure("component_mismatch", f"{component}: {reason}" if component else reason, 502, component)
