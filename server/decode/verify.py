"""The proof before a commit: is what lies in this memory, byte for byte, what the prefill node computed?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.cache.arena import Arena
from server.cache.digest import StateDigests
from server.cache.handoff import HandoffHead, packed_prompt_hash, read_head
from server.cache.layout import Placement
from server.cache.live import live_positions
from server.cache.owners import LiveItems, WrongOwner
from server.cache.specs import HANDOFF, LayoutError
from server.decode.room import Proof
from server.engine.request import TokenLogprob
from server.failure import Failure
from server.transfer.checks import Check
from server.transfer.parts import PROMPT_LOGPROBS, PartsReceived
from server.transfer.plan import check_coverage, check_nbytes
from server.transfer.protocol import Done, RoomRequest, RoutedRequest, SentPromptLogprobs
from server.transfer.rooms import RoomKey


@dataclass(frozen=True)
class Expected:
    """What a room is waiting for: the state of a prompt of ``n`` tokens with ``prompt_hash``.

    By component, the rows ``live`` and their ``nbytes``; ``items`` are the slots and pages that they come to, and
    ``digests`` knows where. Made when the room opens, so that little is left to do at its end.
    """

    arena: Arena
    placement: Placement
    key: RoomKey
    n: int
    prompt_hash: bytes
    live: dict[str, range]
    nbytes: dict[str, int]
    items: list[LiveItems]
    digests: StateDigests

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())

    @staticmethod
    def of(
        arena: Arena,
        placement: Placement,
        components: tuple[str, ...],
        key: RoomKey,
        asked: RoomRequest | RoutedRequest,
    ) -> Expected:
        """Raises :class:`LayoutError` for a placement that cannot hold the prompt."""
        if isinstance(asked, RoutedRequest):
            n, wanted = asked.n_tokens, asked.prompt_hash
        else:
            n, wanted = len(asked.prompt) // 4, packed_prompt_hash(asked.prompt)
        layout = arena.layout
        live = live_positions(n, layout.window, components)
        return Expected(
            arena,
            placement,
            key,
            n,
            wanted,
            live,
            nbytes={name: len(rows) * layout.component(name).row_nbytes for name, rows in live.items()},
            items=arena.owners.items_of(n, placement, components),
            digests=StateDigests(arena, n, placement, components),
        )


@dataclass(frozen=True)
class Evidence:
    """What a room is judged by: what it waits for, its memory, and what the prefill node says it sent."""

    expected: Expected
    done: Done
    scores: PartsReceived | None = None
    """The prompt's log probabilities, if they are wanted."""


def check_stamp(found: Evidence) -> Failure | None:
    """Every slot and page that rows were received into is stamped with this room."""
    try:
        expected = found.expected
        expected.arena.owners.check_items(expected.items, expected.key.owner)
    except WrongOwner as error:
        return error.failure
    return None


def check_claims(found: Evidence) -> Failure | None:
    """``Done`` is for this many tokens, and claims exactly the live rows of every component. All log probabilities of
    the prompt have come, if they are wanted.
    """
    done, expected = found.done, found.expected
    if done.n != expected.n:
        return _mismatch(Check.COVERAGE, "", f"Done is for {done.n} tokens, the prompt has {expected.n}")
    gap = check_coverage(done.sent, expected.live)
    if gap is not None:
        return _mismatch(Check.COVERAGE, gap.component, gap.reason)
    return _scores_mismatch(done.prompt_logprobs, found.scores)


def _scores_mismatch(claimed: SentPromptLogprobs | None, scores: PartsReceived | None) -> Failure | None:
    """What is wrong with the number of the prompt's log probabilities."""
    if scores is None:
        reason = None if claimed is None else "Done claims some, and none were asked for"
    elif claimed is None:
        reason = "they were asked for, and Done claims none"
    elif not scores.is_complete:
        reason = f"they have come up to position {scores.next - 1} of {scores.stop - 1}"
    elif claimed.n_rows != (n_rows := scores.stop - scores.first):
        reason = f"Done claims {claimed.n_rows} of them, {n_rows} have come"
    else:
        reason = None
    return _mismatch(Check.COVERAGE, PROMPT_LOGPROBS, reason) if reason is not None else None


def check_bytes(found: Evidence) -> Failure | None:
    """``Done`` claims this node's own byte counts."""
    gap = check_nbytes(found.done.sent, found.expected.nbytes)
    return _mismatch(Check.BYTES, gap.component, gap.reason) if gap is not None else None


def check_digests(found: Evidence) -> Failure | None:
    """The live bytes of every component in this memory have the digests that the prefill node took of its own, and so
    have the prompt's log probabilities.
    """
    theirs = {sent.component: sent.digest for sent in found.done.sent}
    for name, ours in found.expected.digests.finish().digests().items():
        if name not in theirs:
            return _mismatch(Check.DIGEST, name, "the prefill node has sent no digest")
        if theirs[name] != ours:
            values = f"the prefill node has {theirs[name]:016x}, this memory has {ours:016x}"
            return _mismatch(Check.DIGEST, name, f"its digest differs: {values}")
    if _digests_differ(found.done.prompt_logprobs, found.scores):
        return _mismatch(Check.DIGEST, PROMPT_LOGPROBS, "their digest is not the one that the prefill node took")
    return None


def _digests_differ(claimed: SentPromptLogprobs | None, scores: PartsReceived | None) -> bool:
    return claimed is not None and scores is not None and claimed.digest != scores.digest


def check_handoff(found: Evidence) -> Failure | None:
    """The hand-off row in this memory is of this room, epoch, prompt length and prompt."""
    try:
        row = read_head(found.expected.arena, found.expected.placement)
    except LayoutError as error:
        return _mismatch(Check.HANDOFF, HANDOFF, str(error))
    difference = _difference(row, found.expected)
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
    """Makes every check that is not ``skipped``; the first failure ends it.

    Raises :class:`LayoutError` if the check of the hand-off row was skipped and the row cannot be read.
    """
    for check, failure_of in CHECKS.items():
        if check not in skipped and (failure := failure_of(found)) is not None:
            return failure
    row = read_head(found.expected.arena, found.expected.placement)
    return TokenLogprob(row.first_token, row.first_logprob, row.top)


def _difference(row: HandoffHead, expected: Expected) -> str | None:
    key = expected.key
    if (row.room, row.epoch) != (key.room, key.epoch):
        return f"it is of room {row.room} epoch {row.epoch}, expected {key}"
    if row.n != expected.n:
        return f"it is of {row.n} prompt tokens, expected {expected.n}"
    if row.prompt_hash != expected.prompt_hash:
        return "it is of another prompt: the prompt hash differs"
    return None


def _mismatch(check: Check, component: str, reason: str) -> Failure:
    return Failure("component_mismatch", f"{component}: {reason}" if component else reason, component, check)
