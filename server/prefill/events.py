"""What happens to a room on the prefill node, and what it wants done then: :class:`~server.prefill.room.PrefillRoom`
takes events and gives actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.cache.digest import PageRanges, StateParts
from server.failure import Failure
from server.transfer.plan import Rows
from server.transfer.protocol import Abort, Committed, PromptLogprobsReceived, Rejected, Reserve
from server.transfer.rooms import Forget, GivenUp, PeerLost, Send, Tick

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admitted:
    """The room has a slot and pages, and the engine has the request. Of the prompt ``n_reused`` tokens need not be
    computed.
    """

    n_reused: int = 0


@dataclass(frozen=True)
class CacheDamaged:
    """The engine will not compute on from what the cache gave, and will not touch the room's memory again."""


@dataclass(frozen=True)
class QueueMoved:
    """Some other room made progress: waiting in the queue is no silence."""


@dataclass(frozen=True)
class Advanced:
    """The engine has computed prompt positions ``0 .. n_computed - 1``."""

    n_computed: int


@dataclass(frozen=True)
class Scored:
    """The engine has the next rows of the prompt's log probabilities."""

    rows: bytes


@dataclass(frozen=True)
class Computed:
    """The engine is finished with the prompt; ``parts`` are the digests of every live byte."""

    parts: StateParts
    prefill_s: float
    digest_s: float


@dataclass(frozen=True)
class EngineIdle:
    """The engine will not touch the room's memory again: after a cancel, or because of ``failure``."""

    failure: Failure | None = None


@dataclass(frozen=True)
class Pushed:
    """The node handed a batch to the sender (``batch_id`` None: there was nothing to write). ``last`` with the tail.

    ``pieces`` are counted by component. ``held`` are the pages of this batch and of those before that were not written,
    because the decode node has them.
    """

    batch_id: int | None
    rows: tuple[Rows, ...]
    pieces: Mapping[str, int]
    last: bool
    held: PageRanges = ()


@dataclass(frozen=True)
class BatchEnded:
    """The sender is finished with a batch. ``failure`` None: every piece applied.

    ``quiesced``: at this moment no piece of the room, in this batch or another, may still land.
    """

    batch_id: int
    failure: Failure | None
    quiesced: bool


@dataclass(frozen=True)
class SenderGone:
    """The sender is closed; batches without a result will never have one."""


@dataclass(frozen=True)
class Cleaned:
    """The room's memory is scrubbed."""


PrefillEvent = (
    Reserve | Abort | Committed | Rejected | PromptLogprobsReceived | GivenUp | Admitted | CacheDamaged | QueueMoved
    | Advanced | Scored | Computed | EngineIdle | Pushed | BatchEnded | SenderGone | Cleaned | PeerLost | Tick
)  # fmt: skip


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PushPages:
    """Send every page that ``n_computed`` positions fill and that was not sent yet."""

    n_computed: int


@dataclass(frozen=True)
class PushTail:
    """Send everything that was not sent yet."""


@dataclass(frozen=True)
class QueueAgain:
    """Give the room's slot and pages back, and let it be the next one, without what the cache has."""


@dataclass(frozen=True)
class CancelEngine:
    """Stop computing the room."""


@dataclass(frozen=True)
class CancelPush:
    """Submit no further piece of the room."""


@dataclass(frozen=True)
class Clean:
    """Scrub the room's memory (then :class:`Cleaned`)."""


@dataclass(frozen=True)
class Release:
    """Give the room's slot and pages back."""


PrefillAction = Send | PushPages | PushTail | QueueAgain | CancelEngine | CancelPush | Clean | Release | Forget
