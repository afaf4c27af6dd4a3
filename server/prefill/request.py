"""One room's request on the prefill node: its prompt, its memory, and the batches that carry its state away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from server.cache.arena import Arena
from server.cache.layout import Placement
from server.engine.request import GenerationRequest, SamplingParams, TokenLogprob
from server.faults.hooks import Sending
from server.prefill.decode_peer import DecodePeer
from server.prefill.events import Pushed
from server.prefill.held_pages import HeldPages
from server.prefill.kv_sender import Piece, Sender, SendJob
from server.prefill.prefix import PromptPrefix
from server.prefill.room import PrefillRoom
from server.telemetry.rooms import RoomRecorder
from server.transfer.checks import Check
from server.transfer.frames import unpack_tokens
from server.transfer.plan import CopyPlan, Push, Rows, Side
from server.transfer.protocol import Reserve, RoomRequest, RoutedRequest
from server.transfer.rooms import RoomKey

PAGES_PLANNED_AHEAD = 2
"""More full pages than these are not planned for the last batch before it is its time: they will have gone by then."""


@dataclass(frozen=True)
class Batch:
    """A push: ``job`` for the sender (None if nothing is to be written) and ``event`` for the room."""

    job: SendJob | None
    event: Pushed


@dataclass(frozen=True)
class _Planned:
    """What a batch will write, and the rows that it will be said to have written."""

    pieces: tuple[Piece, ...]
    rows: tuple[Rows, ...]


class Outgoing:
    """The state of one room on its way: which pages went already, and the next batch.

    Pages that the decode node offered go when their digests here are known (:meth:`pages_complete`): the same ones do
    not go. Raises :class:`LayoutError` for a placement, here or there, that cannot hold the prompt.
    """

    def __init__(self, arena: Arena, sending: Sending, peer: DecodePeer, reserve: Reserve, n: int) -> None:
        source = Side(arena.layout, sending.source)
        target = Side(peer.layout, Placement(reserve.slot, reserve.pages))
        sent = [name for name in reserve.components if name not in sending.unsent]
        claimed = [name for name in reserve.components if name not in sending.unclaimed]
        self._key = RoomKey.of(reserve)
        self._base, self._peer_base = arena.ptr, peer.manifest.arena_base
        self._page_size = arena.layout.page_size
        self._n = n
        self._plan = CopyPlan(source, target, n, sent)
        self._claims = CopyPlan(source, target, n, claimed) if claimed != sent else self._plan
        self._miscounted = {name: arena.layout.component(name).row_nbytes for name in sending.miscounted}
        self._holds_pages = sending.holds_pages
        self._held = HeldPages(reserve.offered, is_trusting=Check.OFFER in sending.skipped)
        self._pages_sent = 0
        self._n_batches = 0
        self._tail: _Planned | None = None

    def pages_complete(self, digests: Sequence[bytes]) -> None:
        """Takes the digests of the next complete pages here."""
        self._held.compare(digests)

    def push_pages(self, n_computed: int, deadline_s: float) -> Batch | None:
        """The pages that ``n_computed`` positions fill and that were not sent yet; None if there are none.

        ``deadline_s`` is when they must have arrived, on the sender's clock.
        """
        first, last = self._pages_sent, self._held.n_known(min(n_computed, self._n) // self._page_size)
        if last <= first or self._holds_pages:
            return None
        self._pages_sent = last
        self._tail = None
        push = self._plan.full_pages(first, last, self._held)
        claimed = push if self._claims is self._plan else self._claims.full_pages(first, last, self._held)
        return self._batch(self._planned(push, claimed), deadline_s, last=False)

    def push_tail(self, deadline_s: float) -> Batch:
        """Everything that was not sent yet."""
        return self._batch(self._plan_tail(), deadline_s, last=True)

    def plan_ahead(self) -> None:
        """Plans the last batch while the prompt is still computed, if few pages may yet go before it."""
        if self._held.are_known and self._n // self._page_size - self._pages_sent <= PAGES_PLANNED_AHEAD:
            self._plan_tail()

    def _plan_tail(self) -> _Planned:
        if self._tail is None:
            push = self._plan.tail(self._pages_sent, self._held)
            claimed = push if self._claims is self._plan else self._claims.tail(self._pages_sent, self._held)
            self._tail = self._planned(push, claimed)
        return self._tail

    def _planned(self, push: Push, claimed: Push) -> _Planned:
        base, peer_base = self._base, self._peer_base
        pieces = tuple(Piece(c.component, base + c.src, peer_base + c.dst, c.nbytes) for c in push.copies)
        return _Planned(pieces, claimed.rows)

    def _batch(self, planned: _Planned, deadline_s: float, *, last: bool) -> Batch:
        pieces = planned.pieces
        rows = tuple(self._counted(each) for each in planned.rows) if self._miscounted else planned.rows
        if not pieces:
            return Batch(None, Pushed(None, rows, {}, last, self._held.spans))
        self._n_batches += 1
        job = SendJob(self._key, self._n_batches, pieces, deadline_s)
        n_pieces = Counter(piece.component for piece in pieces)
        return Batch(job, Pushed(self._n_batches, rows, n_pieces, last, self._held.spans))

    def _counted(self, rows: Rows) -> Rows:
        """As they are, unless they are the first ones of a component that is to be miscounted."""
        return replace(rows, nbytes=rows.nbytes - self._miscounted.pop(rows.component, 0)) if rows.nbytes else rows


@dataclass(eq=False)
class PrefillRequest:
    """A room with everything the node holds for it, until its memory is free again.

    The prompt of a room that a router chose is empty until its request has come over HTTP. ``sender`` writes into the
    memory of ``peer``. ``first`` is the first token, once it is chosen. ``scores_kept`` are rows of the prompt's log
    probabilities that the answer over HTTP is to have. ``record`` is of this room. ``prefix`` is what the cache has to
    do with the prompt; None: nothing.
    """

    room: PrefillRoom
    request: GenerationRequest
    peer: DecodePeer
    sender: Sender
    record: RoomRecorder
    placement: Placement | None = None
    outgoing: Outgoing | None = None
    first: TokenLogprob | None = None
    scores_kept: bytearray | None = None
    prefix: PromptPrefix | None = None

    @property
    def key(self) -> RoomKey:
        return self.room.key

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.room.n_tokens


def read_request(reserve: Reserve) -> GenerationRequest:
    """What a ``Reserve`` asks for, without a prompt where that comes over HTTP.

    Raises :class:`ProtocolError` for a prompt that is no list of int32.
    """
    asked = reserve.request
    prompt = unpack_tokens(asked.prompt) if isinstance(asked, RoomRequest) else ()
    sampling = msgspec.convert(asked.sampling, SamplingParams, from_attributes=True)
    return GenerationRequest(asked.request_id, prompt, sampling, cache_salt=asked.salt)


def n_tokens_of(reserve: Reserve, request: GenerationRequest) -> int:
    """Tokens of the prompt, also of one that has not come yet."""
    asked = reserve.request
    return asked.n_tokens if isinstance(asked, RoutedRequest) else len(request.prompt_ids)
