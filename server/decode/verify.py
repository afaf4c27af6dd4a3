"""The proof before a commit: is what lies in this memory, byte for byte, what the prefill node computed?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from server.cache.arena import Arena
from server.cache.digest import NOTHING, PageRanges, StateDigests
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
from server.transfer.protocol import Done, PageSpan, RoomRequest, RoutedRequest, SentPromptLogprobs
from server.transfer.rooms import RoomKey

PREFIX_DAMAGED = "prefix_damaged"
"""The code of a failure that lies in pages of this node: they were held, and are not the prefill node's."""


@dataclass(frozen=True)
class Expected:
    """What a room is waiting for: the state of a prompt of ``n`` tokens with ``prompt_hash``.

    By component, the rows ``live`` and their ``nbytes``; ``items`` are the slots and pages that they come to, and
    ``digests`` knows where. Made when the room opens, so that little is left to do at its end.

    The pages ``offered`` are here already. Where the prefill node has said which of them are ``held``
    (:meth:`settled`), they are in ``placement``, and their ``held_nbytes`` are not in ``nbytes``. ``page_digests``, of
    the complete pages, are taken by the check of the digests.
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
    offered: tuple[int, ...]
    held: PageRanges = ()
    held_nbytes: dict[str, int] = field(default_factory=dict)
    page_digests: list[bytes] = field(default_factory=list)

    @property
    def total_nbytes(self) -> int:
        """What is to be checked."""
        return sum(self.nbytes.values()) + sum(self.held_nbytes.values())

    @property
    def held_pages(self) -> list[int]:
        """The numbers of the held pages in the prompt, ascending."""
        return [page for first, stop in self.held for page in range(first, stop)]

    @staticmethod
    def of(
        arena: Arena,
        placement: Placement,
        components: tuple[str, ...],
        key: RoomKey,
        asked: RoomRequest | RoutedRequest,
        offered: tuple[int, ...] = (),
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
            offered=offered,
        )

    def settled(self, held: Sequence[PageSpan]) -> Expected:
        """The same with the pages ``held`` of those that were offered, as far as they can be: what is wrong with the
        others is found by :func:`check_claims`.
        """
        spans, _ = _possible(held, len(self.offered))
        if not spans:
            return self
        layout, pages, names = self.arena.layout, list(self.placement.pages), tuple(self.live)
        for first, stop in spans:
            pages[first:stop] = self.offered[first:stop]
        placement = replace(self.placement, pages=tuple(pages))
        n_held = sum(stop - first for first, stop in spans)
        held_nbytes = {c.name: n_held * c.rows * c.row_nbytes for c in layout.page_components if c.name in self.live}
        return replace(
            self,
            placement=placement,
            nbytes={name: nbytes - held_nbytes.get(name, 0) for name, nbytes in self.nbytes.items()},
            items=self.arena.owners.items_of(self.n, placement, names),
            digests=StateDigests(self.arena, self.n, placement, names),
            held=spans,
            held_nbytes=held_nbytes,
            page_digests=[],
        )


def _possible(held: Sequence[PageSpan], n_offered: int) -> tuple[PageRanges, str | None]:
    """The spans of ``held`` up to the first that cannot be, and what is wrong with that one. They ascend, do not touch
    each other, and are of the first ``n_offered`` pages.
    """
    end = -1
    for i, (first, stop) in enumerate(held):
        wrong = f"Done says that the pages {first} .. {stop - 1} are held"
        if stop > n_offered:
            return tuple(held[:i]), f"{wrong}, and {n_offered} pages were offered"
        if not end < first < stop:
            return tuple(held[:i]), f"{wrong}, and its spans do not ascend: the one before ends with page {end - 1}"
        end = stop
    return tuple(held), None


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
    """``Done`` is for this many tokens, and claims exactly the live rows of every component; what it says is held was
    offered. All log probabilities of the prompt have come, if they are wanted.
    """
    done, expected = found.done, found.expected
    if done.n != expected.n:
        return _mismatch(Check.COVERAGE, "", f"Done is for {done.n} tokens, the prompt has {expected.n}")
    if done.n_reused >= done.n:
        return _mismatch(Check.COVERAGE, "", f"Done says that {done.n_reused} of {done.n} tokens were not computed")
    _, reason = _possible(done.held, len(expected.offered))
    if reason is not None:
        return _mismatch(Check.COVERAGE, "", reason)
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
    """``Done`` claims this node's own byte counts, of what was written and of what is held."""
    gap = check_nbytes(found.done.sent, found.expected.nbytes)
    if gap is not None:
        return _mismatch(Check.BYTES, gap.component, gap.reason)
    for claim in found.done.sent:
        ours = found.expected.held_nbytes.get(claim.component, 0)
        if claim.held_nbytes != ours:
            reason = f"{claim.held_nbytes} bytes are said to be held, {ours} are in the pages that are"
            return _mismatch(Check.BYTES, claim.component, reason)
    return None


def check_digests(found: Evidence) -> Failure | None:
    """The live bytes of every component in this memory have the digests that the prefill node took of its own, and so
    have the prompt's log probabilities. Held pages that differ are this node's fault.
    """
    expected = found.expected
    theirs = {sent.component: sent for sent in found.done.sent}
    expected.page_digests[:] = expected.digests.take_pages(expected.n)
    parts = expected.digests.finish()
    for name in expected.live:
        if name not in theirs:
            return _mismatch(Check.DIGEST, name, "the prefill node has sent no digest")
        written, held = parts.split(name, expected.held)
        if theirs[name].digest != written:
            return _mismatch(Check.DIGEST, name, f"its digest differs: {_values(theirs[name].digest, written)}")
        if theirs[name].held_digest != held:
            values = _values(theirs[name].held_digest, held)
            if held == NOTHING:
                return _mismatch(Check.DIGEST, name, f"nothing of it is held, and its digest differs: {values}")
            reason = f"{name}: the digest of its pages that were held differs: {values}"
            return Failure(PREFIX_DAMAGED, reason, name, Check.DIGEST)
    if _digests_differ(found.done.prompt_logprobs, found.scores):
        return _mismatch(Check.DIGEST, PROMPT_LOGPROBS, "their digest is not the one that the prefill node took")
    return None


def _values(theirs: int, ours: int) -> str:
    return f"the prefill node has {theirs:016x}, this memory has {ours:016x}"


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
