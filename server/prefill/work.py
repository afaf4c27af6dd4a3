"""One room's work on the prefill node: its request, its memory, and the batches that carry its state away."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from server.cache.arena import Arena
from server.cache.layout import Placement
from server.engine.request import GenerationRequest, SamplingParams
from server.prefill.peers import PeerSender
from server.transfer.bootstrap import DecodePeer
from server.transfer.faults import Fault
from server.transfer.plan import CopyPlan, Push, Side
from server.transfer.prefill_events import Pushed
from server.transfer.prefill_room import PrefillRoom
from server.transfer.protocol import Reserve, unpack_tokens
from server.transfer.rooms import RoomKey
from server.transfer.sender import Piece, SendJob


@dataclass(frozen=True)
class Batch:
    """A push: ``job`` for the sender (None if nothing is to be written) and ``event`` for the room."""

    job: SendJob | None
    event: Pushed


class Outgoing:
    """The state of one room on its way: which pages went already, and the next batch.

    ``dropped`` components are claimed but not sent (fault injection). Raises :class:`LayoutError` for a placement, here
    or there, that cannot hold the prompt.
    """

    def __init__(
        self, arena: Arena, placement: Placement, peer: DecodePeer, reserve: Reserve, n: int, dropped: frozenset[str]
    ) -> None:
        source = Side(arena.layout, placement)
        target = Side(peer.layout, Placement(reserve.slot, reserve.pages))
        sent = [name for name in reserve.components if name not in dropped]
        self._key = RoomKey(reserve.room, reserve.epoch, reserve.decode)
        self._base, self._peer_base = arena.ptr, peer.manifest.arena_base
        self._page_size = arena.layout.page_size
        self._n = n
        self._plan = CopyPlan(source, target, n, sent)
        self._claims = CopyPlan(source, target, n, reserve.components) if dropped else self._plan
        self._pages_sent = 0
        self._n_batches = 0

    def push_pages(self, n_computed: int, deadline_s: float) -> Batch | None:
        """The pages that ``n_computed`` positions fill and that were not sent yet; None if there are none."""
        first, last = self._pages_sent, min(n_computed, self._n) // self._page_size
        if last <= first:
            return None
        self._pages_sent = last
        push = self._plan.full_pages(first, last)
        return self._batch(push, self._claims.full_pages(first, last), deadline_s, last=False)

    def push_tail(self, deadline_s: float) -> Batch:
        """Everything that was not sent yet."""
        return self._batch(
            self._plan.tail(self._pages_sent), self._claims.tail(self._pages_sent), deadline_s, last=True
        )

    def _batch(self, push: Push, claimed: Push, deadline_s: float, *, last: bool) -> Batch:
        pieces = tuple(Piece(c.component, self._base + c.src, self._peer_base + c.dst, c.nbytes) for c in push.copies)
        if not pieces:
            return Batch(None, Pushed(None, claimed.rows, 0, last))
        self._n_batches += 1
        job = SendJob(self._key, self._n_batches, pieces, time.monotonic() + deadline_s)
        return Batch(job, Pushed(self._n_batches, claimed.rows, len(pieces), last))


@dataclass
class RoomWork:
    """A room with everything the node holds for it."""

    room: PrefillRoom
    request: GenerationRequest
    target: PeerSender
    placement: Placement | None = None
    outgoing: Outgoing | None = None
    struck: tuple[Fault, ...] = ()


def read_request(reserve: Reserve) -> GenerationRequest:
    """The work a ``Reserve`` asks for. Raises :class:`ProtocolError` for a prompt that is no list of int32."""
    sampling = SamplingParams(**msgspec.structs.asdict(reserve.request.sampling))
    return GenerationRequest(reserve.request.request_id, unpack_tokens(reserve.request.prompt), sampling)
