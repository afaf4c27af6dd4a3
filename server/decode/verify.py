"""The proof before a commit: is what lies in this memory, byte for byte, what the prefill node computed?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.cache.arena import Arena
from server.cache.digest import live_digests
from server.cache.handoff import Handoff, prompt_hash, read_handoff
from server.cache.layout import Placement
from server.cache.owners import WrongOwner
from server.cache.specs import HANDOFF, LayoutError
from server.decode.room import Proof
from server.engine.request import GenerationRequest, TokenLogprob
from server.failure import Failure
from server.transfer.checks import Check
from server.transfer.plan import check_coverage, check_nbytes
from server.transfer.protocol import Done
from server.transfer.rooms import RoomKey


@dataclass(frozen=True)
class Evidence:
    """What a room is judged by: its memory, what was asked for, and what the prefill node says it sent."""

    arena: Arena
    placement: Placement
    components: tuple[str, ...]
    key: RoomKey
    request: GenerationRequest
    done: Done

    @property
    def n(self) -> int:
        return len(self.request.prompt_ids)


def check_stamp(found: Evidence) -> Failure | None:
    """Every slot and page that rows were received into is stamped with this room."""
    try:
        found.arena.owners.check(found.n, found.placement, found.components, found.key.owner)
    except WrongOwner as error:
        return error.failure
    return None


def check_claims(found: Evidence) -> Failure | None:
    """``Done`` is for this many tokens, and claims exactly the live rows of every component."""
    if found.done.n != found.n:
        return _mismatch(Check.COVERAGE, "", f"Done is for {found.done.n} tokens, the prompt has {found.n}")
    gap = check_coverage(found.done.sent, found.arena.layout, found.n, found.components)
    return _mismatch(Check.COVERAGE, gap.component, gap.reason) if gap is not None else None


def check_bytes(found: Evidence) -> Failure | None:
    """``Done`` claims this node's own byte counts."""
    gap = check_nbytes(found.done.sent, found.arena.layout, found.n)
    return _mismatch(Check.BYTES, gap.component, gap.reason) if gap is not None else None


def check_digests(found: Evidence) -> Failure | None:
    """The live bytes of every component in this memory have the digests that the prefill node took of its own."""
    theirs = {sent.component: sent.digest for sent in found.done.sent}
    for name, ours in live_digests(found.arena, found.n, found.placement, found.components).items():
        if name not in theirs:
            return _mismatch(Check.DIGEST, name, "the prefill node has sent no digest")
        if theirs[name] != ours:
            values = f"the prefill node has {theirs[name]:016x}, this memory has {ours:016x}"
            return _mismatch(Check.DIGEST, name, f"its digest differs: {values}")
    return None


def check_handoff(found: Evidence) -> Failure | None:
    """The hand-off row in this memory is of this room, epoch, prompt length and prompt."""
    try:
        row = read_handoff(found.arena, found.placement, hc_mult=1)
    except LayoutError as error:
        return _mismatch(Check.HANDOFF, HANDOFF, str(error))
    difference = _difference(row, found.key, found.request)
    return _mismatch(Check.HANDOFF, HANDOFF, difference) if difference is not None else None


CHECKS: dict[Check, Callable[[Evidence], Failure | None]] = {
    Check.STAMP: check_stamp,
    Check.COVERAGE: check_claims,
    Check.BYTES: check_bytes,
    Check.DIGEST: check_digests,
    Check.HANDOFF: check_handoff,
}
"""In the order in which they are made."""


def verify(found: Evidence, skipped: frozenset[Check] = frozenset()) -> Proof:
    """Makes every check that is not ``skipped``; the first failure ends it. Runs in a worker thread.

    Raises :class:`LayoutError` if the check of the hand-off row was skipped and the row cannot be read.
    """
    for check, failure_of in CHECKS.items():
        if check not in skipped and (failure := failure_of(found)) is not None:
            return failure
    row = read_handoff(found.arena, found.placement, hc_mult=1)
    return TokenLogprob(row.first_token, row.first_logprob, row.top)


def _difference(row: Handoff, key: RoomKey, request: GenerationRequest) -> str | None:
    if (row.room, row.epoch) != (key.room, key.epoch):
        return f"it is of room {row.room} epoch {row.epoch}, expected {key}"
    if row.n != len(request.prompt_ids):
        return f"it is of {row.n} prompt tokens, expected {len(request.prompt_ids)}"
    if row.prompt_hash != prompt_hash(request.prompt_ids):
        return "it is of another prompt: the prompt hash differs"
    return None


def _mismatch(check: Check, component: str, reason: str) -> Failure:
    return Failure("component_mismatch", f"{component}: {reason}" if component else reason, component, check)
