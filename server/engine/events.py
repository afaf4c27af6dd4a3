"""What a node and its engine thread send each other: commands to the engine, events back; small frozen records."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from server.cache.digest import StateParts
from server.cache.layout import Placement
from server.cache.owners import Owner
from server.cache.prefix import PrefixHit
from server.cache.snapshots import Snapshot, SnapshotPoint
from server.engine.guide import Guide
from server.engine.request import FinishReason, GenerationRequest, TokenLogprob, TokenOutput
from server.failure import Failure


@dataclass(frozen=True)
class Prefill:
    """Compute the prompt and its first token into ``placement`` and stop there (all that a prefill node does).

    The memory must be stamped with ``owner`` when the digests are taken; None: do not look. The first tokens of
    ``hit``, if there is one, need not be computed: their pages are in ``placement`` already; they and the snapshot are
    digested again and compared, unless it is not ``hit_is_checked``. At ``snapshots_at``, in ascending order, snapshots
    are wanted.
    """

    key: Hashable
    request: GenerationRequest
    placement: Placement
    room: int
    epoch: int
    owner: Owner | None = None
    hit: PrefixHit | None = None
    snapshots_at: tuple[SnapshotPoint, ...] = ()
    hit_is_checked: bool = True


@dataclass(frozen=True)
class Generate:
    """Compute the prompt here and go on decoding here (``--local-prefill``)."""

    key: Hashable
    request: GenerationRequest
    placement: Placement


@dataclass(frozen=True)
class Resume:
    """Decode on from committed state: ``placement`` holds the prompt's state, ``first`` is the token the prefill node
    chose. The memory must be stamped with ``owner``; None: do not look.
    """

    key: Hashable
    request: GenerationRequest
    placement: Placement
    first: TokenLogprob
    owner: Owner | None = None


@dataclass(frozen=True)
class Prepare:
    """``request`` is computed elsewhere: get ready for its :class:`Resume`. After a :class:`Scrub` of its key none
    comes.
    """

    key: Hashable
    request: GenerationRequest


@dataclass(frozen=True)
class Cancel:
    """Stop working on ``key``. Answered by :class:`Finished` (reason ``abort``) unless it had ended already."""

    key: Hashable


@dataclass(frozen=True)
class Scrub:
    """Make ``placement`` fit to be free again (poison pattern where that is on). Answered by :class:`Scrubbed`."""

    key: Hashable
    placement: Placement


@dataclass(frozen=True)
class Stop:
    """End the thread after the current step."""


Begin = Prefill | Generate | Resume


@dataclass(frozen=True)
class GrammarReady:
    """The engine's own command: the grammar of ``command`` is compiled, or cannot be."""

    command: Begin
    guide: Guide | Exception


Command = Begin | Prepare | Cancel | Scrub | Stop | GrammarReady


@dataclass(frozen=True)
class ChunkComputed:
    """State of prompt positions ``0 .. n_computed - 1`` is in the pools. ``pages`` are the digests of the pages that
    are complete since the last such event, in order.
    """

    key: Hashable
    n_computed: int
    pages: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class SnapshotTaken:
    """The slot's state at a boundary that was asked for; its pages were reported before."""

    key: Hashable
    snapshot: Snapshot


@dataclass(frozen=True)
class HitRefused:
    """What the cache gave for a prompt is not what was put there: ``failure`` says what. The key's placement was not
    written to, and is no longer touched. ``page`` is the number of the damaged page; None: the snapshot is.
    """

    key: Hashable
    failure: Failure
    page: int | None


@dataclass(frozen=True)
class PromptScored:
    """The next rows of the prompt's :class:`.PromptLogprobs`, in their order: of every token that has one, before the
    prompt is reported as computed.
    """

    key: Hashable
    rows: bytes


@dataclass(frozen=True)
class PrefillFinished:
    """The whole prompt is computed, the hand-off row is written, and the digests of every live byte are taken.

    ``pages`` are the digests of the complete pages that no :class:`ChunkComputed` had.
    """

    key: Hashable
    first: TokenLogprob
    parts: StateParts
    prefill_s: float
    digest_s: float
    pages: tuple[bytes, ...] = ()


class Output(msgspec.Struct, frozen=True):
    """One for every request and step: a struct is made in a fifth of the time that a dataclass takes."""

    key: Hashable
    output: TokenOutput


@dataclass(frozen=True)
class Finished:
    """The engine will not touch the key's placement again (for ``Prefill``: sent only after a cancel).

    After a :class:`Resume`, if the engine was built to digest pages: ``tokens`` are those whose state is in the pools,
    prompt and answer, and ``pages`` the digests of the pages that were completed by decoding, from page
    ``n_prompt // page_size`` on.
    """

    key: Hashable
    reason: FinishReason
    tokens: tuple[int, ...] = ()
    pages: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ComputeFailed:
    """The engine gave this key up; like :class:`Finished`, its placement is no longer touched."""

    key: Hashable
    failure: Failure


@dataclass(frozen=True)
class Scrubbed:
    key: Hashable


@dataclass(frozen=True)
class Died:
    """The engine thread ended by an exception: the process must report it in ``/health`` and end."""

    message: str


Event = (
    ChunkComputed
    | SnapshotTaken
    | HitRefused
    | PromptScored
    | PrefillFinished
    | Output
    | Finished
    | ComputeFailed
    | Scrubbed
    | Died
)
