"""A room's memory on the prefill node: granted, with what the cache has of its prompt, stamped, planned from, kept for
later prompts, and given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from server.cache.allocator import ItemState
from server.cache.layout import Placement
from server.cache.owners import WrongOwner
from server.cache.snapshots import Snapshot
from server.cache.specs import LayoutError
from server.engine.events import HitRefused, Prefill
from server.engine.prompt_logprobs import over_limit
from server.engine.request import GenerationRequest
from server.failure import Failure, internal_error
from server.node.context import NodeContext, NodeSettings
from server.prefill.decode_peer import DecodePeer
from server.prefill.prefix import PromptPrefix, snapshot_points, to_wait_for
from server.prefill.request import Outgoing, PrefillRequest
from server.transfer.checks import PLACEMENT, Check
from server.transfer.plan import Side, check_holds
from server.transfer.protocol import Reserve, RoomRequest


class RoomMemory:
    """Slots and pages of all rooms. Lives in the node's event loop."""

    def __init__(self, settings: NodeSettings, context: NodeContext) -> None:
        self._arena = context.arena
        self._allocator = context.allocator
        self._hooks = context.hooks
        self._max_tokens = min(settings.max_context, context.allocator.capacity_tokens)
        self._vocab_size = context.tokenizer.vocab_size
        self._cache = context.prefix_cache
        self._page_size = context.arena.layout.page_size
        self._snapshot_every = settings.snapshot_every
        self._snapshots_are_kept = True
        """Whether the cache had room for the last one: it is in vain to wait for one otherwise."""

    def refuses(self, peer: DecodePeer, reserve: Reserve, request: GenerationRequest, n: int) -> Failure | None:
        """Why no memory of this node, or of ``peer``, will ever hold ``reserve`` with its ``n`` tokens, or None."""
        prompt = request.prompt_ids or (0,)  # one that comes over HTTP was checked there
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            return Failure("bad_token", f"a prompt token is not in the vocabulary of {self._vocab_size}")
        if n > self._max_tokens:
            reason = f"the prompt has {n} tokens, the prefill node computes at most {self._max_tokens}"
            return Failure("context_length_exceeded", reason)
        if (too_much := over_limit(n, request.sampling.prompt_logprobs)) is not None:
            return Failure("bad_sampling", too_much)
        if len(reserve.offered) not in range(0, 8 * (n // self._page_size) + 1, 8):
            reason = f"{len(reserve.offered)} bytes of page digests are offered, 8 for each full page of {n} tokens fit"
            return Failure("bad_reserve", reason)
        try:
            check_holds(Side(peer.layout, Placement(reserve.slot, reserve.pages)), n, reserve.components)
            for name in reserve.components:
                self._arena.layout.component(name)
        except LayoutError as error:
            return Failure("bad_reserve", str(error))
        return None

    def look_up(self, req: PrefillRequest) -> None:
        """Makes the content keys of a room's prompt, which is there now. One whose log probabilities are wanted has to
        be computed from its first token.
        """
        if self._cache is not None:
            asked = req.room.reserve.request
            prompt = asked.prompt if isinstance(asked, RoomRequest) else req.request.prompt_ids
            keys = self._cache.keys_of(prompt, req.request.cache_salt)
            req.prefix = PromptPrefix(keys, may_hit=req.request.sampling.prompt_logprobs is None)

    def waits(self, req: PrefillRequest, others: Iterable[PrefillRequest]) -> bool:
        """Whether one of ``others`` is about to compute more of the prompt than the cache has. It is looked at again
        when that is there, or will never be.
        """
        prefix = req.prefix
        if self._cache is None or prefix is None or not prefix.may_hit or not self._snapshots_are_kept:
            return False
        if prefix.awaited is None or not prefix.awaited.is_coming:
            hit = self._cache.hit(prefix.keys)
            computed = (other.prefix for other in others if other.prefix is not None)
            prefix.awaited = to_wait_for(prefix.keys, self._page_size, 0 if hit is None else hit.n, computed)
        return prefix.awaited is not None

    def grant(self, req: PrefillRequest, others: Iterable[PrefillRequest] = ()) -> bool:
        """Gives a room a slot and pages, stamped as its own, among them what the cache has of its prompt; False if they
        are not free now. Where its prompt parts from those of ``others`` a snapshot is wanted.
        """
        key, prefix, hit = req.key, req.prefix, None
        if self._cache is not None and prefix is not None and prefix.may_hit:
            hit = self._cache.hit(prefix.keys)
            hit = hit and self._hooks.cache_hit(key, hit)
        pages = () if hit is None else tuple(page.page for page in hit.pages)
        placement = self._allocator.reserve(key, req.n_tokens, shared=pages)
        if placement is None:
            return False
        req.placement = placement
        req.record.placed(placement.slot, len(placement.pages))
        self._arena.owners.stamp(placement, key.owner)
        if self._cache is not None and prefix is not None:
            chain = self._cache.match(prefix.keys)
            under_way = [other.prefix.keys for other in others if other is not req and other.prefix is not None]
            n_hit = 0 if hit is None else hit.n
            args = prefix.keys, self._page_size, n_hit, chain, under_way, self._snapshot_every
            prefix.begin(hit, snapshot_points(*args))
        return True

    def prepare(self, req: PrefillRequest) -> Prefill:
        """Plans how the room's state will go to its decode node; the command that has it computed.

        Raises :class:`LayoutError`, or :class:`WrongOwner` for memory that is stamped as another's.
        """
        if req.placement is None:
            raise RuntimeError(f"{req.key} has no memory")
        key, reserve, n = req.key, req.room.reserve, req.n_tokens
        sending = self._hooks.sending(key, n, req.placement)
        owner = None if Check.STAMP in sending.skipped else key.owner
        if owner is not None:
            self._arena.owners.check(n, sending.source, reserve.components, owner)
        req.outgoing = Outgoing(self._arena, sending, req.peer, reserve, n)
        command = Prefill(key, req.request, sending.source, key.room, key.epoch, owner)
        if sending.source is not req.placement:
            if req.prefix is not None and req.prefix.hit is not None:
                raise LayoutError("a prompt that is computed elsewhere cannot go on from the cache")
            req.prefix = None  # nothing of it is where it would be kept
        if (prefix := req.prefix) is None:
            return command
        is_checked = Check.HIT not in sending.skipped
        return replace(command, hit=prefix.hit, snapshots_at=tuple(prefix.pending), hit_is_checked=is_checked)

    # --- the cache ----------------------------------------------------------------------------------------------------

    def keep_pages(self, req: PrefillRequest, digests: Sequence[bytes]) -> None:
        """The next pages of a room are complete, with these digests: later prompts may use them."""
        prefix, cache = req.prefix, self._cache
        if prefix is None or cache is None or req.placement is None:
            return
        for digest in digests:
            index = prefix.n_complete
            prefix.n_complete += 1
            if index >= req.placement.read_only:
                cache.keep_page(req.key, req.key.owner, prefix.keys, index, digest)

    def keep_snapshot(self, req: PrefillRequest, snapshot: Snapshot) -> None:
        """The prompts that begin with these pages can be computed from there."""
        prefix = req.prefix
        if prefix is None or self._cache is None:
            return
        prefix.pending = [point for point in prefix.pending if point.n > snapshot.n]
        is_kept = self._cache.keep_snapshot(snapshot, prefix.keys)
        chain = () if is_kept else self._cache.match(prefix.keys)  # there may have been one already
        self._snapshots_are_kept = is_kept or any(page.snapshot for page in chain if page.key == snapshot.key)

    def refused(self, req: PrefillRequest, event: HitRefused) -> None:
        """What the cache gave is damaged: it is forgotten, and the room gets nothing more from there."""
        prefix, cache = req.prefix, self._cache
        if prefix is None or cache is None or prefix.hit is None:
            return
        prefix.may_hit = False
        pages = prefix.hit.pages
        page = pages[-1] if event.page is None else pages[event.page]
        if cache.page_of(page.page) is not page:
            return  # it is forgotten already
        if event.page is not None:
            cache.drop(page)
        elif page.snapshot is prefix.hit.snapshot:
            cache.drop_snapshot(page)

    def failed(self, req: PrefillRequest) -> None:
        """The room could not be computed to its end, so nobody knows what its pages are worth: the cache forgets those
        that it has from it.
        """
        prefix, cache, placement = req.prefix, self._cache, req.placement
        if prefix is None or cache is None or placement is None:
            return
        for page in placement.pages[placement.read_only : prefix.n_complete]:
            if (kept := cache.page_of(page)) is not None:
                cache.drop(kept)

    # --- the end ------------------------------------------------------------------------------------------------------

    def give_back(self, req: PrefillRequest) -> None:
        """Nobody reads or writes there any more: what the cache has of it is free to be evicted."""
        key = req.key
        if req.prefix is not None:
            req.prefix.ended()
        if req.placement is not None:
            self._hooks.memory_free(key)
            self._arena.owners.clear(req.placement, key.owner)
        if self._allocator.state_of(key) is not ItemState.FREE:
            self._allocator.release(key)
        req.placement = req.outgoing = None
        if self._cache is not None:
            self._cache.trim()


def placement_failure(error: Exception) -> Failure:
    """Why :meth:`RoomMemory.prepare` raised: memory that is not the room's own or cannot hold it, or a mistake here."""
    if isinstance(error, WrongOwner):
        return error.failure
    if isinstance(error, LayoutError):
        return Failure("bad_placement", str(error), error.component, PLACEMENT)
    return internal_error("prefill", error)
