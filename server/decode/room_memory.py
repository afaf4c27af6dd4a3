"""A request's memory on the decode node: granted beside the cached pages that are offered for it, settled when its
state is proved, kept or given back at its end.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from server.cache.allocator import ItemState
from server.cache.layout import Placement
from server.cache.prefix import CachedPage
from server.decode.request import DecodeRequest
from server.decode.verify import PREFIX_DAMAGED
from server.engine.events import Finished
from server.failure import Failure
from server.node.context import NodeContext
from server.transfer.checks import Check
from server.transfer.frames import pack_tokens


class RoomMemory:
    """Slots and pages of all requests, and what the prefix cache has for them. Lives in the node's event loop.

    Where prompts are computed here (``is_local``), nothing is kept.
    """

    def __init__(self, context: NodeContext, *, is_local: bool) -> None:
        self._allocator = context.allocator
        self._owners = context.arena.owners
        self._page_size = context.arena.layout.page_size
        self._hooks = context.hooks
        self._cache = None if is_local else context.prefix_cache

    def grant(self, req: DecodeRequest, n_tokens: int) -> Placement | None:
        """Gives ``req`` a slot and pages for ``n_tokens``, stamped as its own, and pins the cached pages that are
        offered for it; None if they are not free now.
        """
        offered = self._offer(req, n_tokens)
        placement = self._allocator.reserve(req.key, n_tokens, pinned=[cached.page for cached in offered])
        if placement is None:
            return None
        req.placement, req.offered = placement, offered
        self._owners.stamp(_with_offers(placement, offered), req.key.owner)
        if offered and self._cache is not None:
            self._hooks.offering(req.key, offered, self._cache)
        return placement

    def _offer(self, req: DecodeRequest, n_tokens: int) -> tuple[CachedPage, ...]:
        """The longest cached chain that the prompt begins with, as far as the pools have room for it beside the
        request's own pages: nothing cached delays an admission.
        """
        if self._cache is None or not req.may_offer or not req.request.sampling.max_tokens:
            return ()
        if req.keys is None:
            req.keys = self._cache.keys_of(req.packed_prompt, req.request.cache_salt)
        found = self._cache.match(req.keys)
        spare = self._allocator.n_available - self._allocator.pages_for(n_tokens)
        taken = itertools.accumulate(not self._allocator.n_readers(cached.page) for cached in found)
        return tuple(cached for cached, n_taken in zip(found, taken, strict=True) if n_taken <= spare)

    def settle(self, req: DecodeRequest) -> Placement:
        """The state of ``req`` is proved: the pages that are held take their places, the other offers are let go.
        Nothing is computed into the prompt's complete pages any more. Returns where the state is now.
        """
        if req.placement is None or req.expected is None:
            raise RuntimeError(f"{req.key} has no memory to settle")
        if req.offered:
            owner, held = req.key.owner, req.expected.held_pages
            self._owners.clear(_with_offers(req.placement, req.offered), owner)
            places = {index: req.offered[index].page for index in held}
            req.placement, req.offered = self._allocator.settle(req.key, places), ()
            self._owners.stamp(req.placement, owner)
        req.placement = replace(req.placement, read_only=req.expected.n // self._page_size)
        return req.placement

    def forget_damaged(self, req: DecodeRequest, failure: Failure) -> None:
        """If ``req`` failed because held pages are not what its prefill node has: the first of them that has changed
        since it was kept is forgotten, and all that follow it; if none has, the first that was held.
        """
        if failure.code != PREFIX_DAMAGED or self._cache is None or req.expected is None or not req.expected.held_pages:
            return
        held, found = req.expected.held_pages, req.expected.page_digests
        changed = (index for index in held if found[index] != req.offered[index].digest)
        cached = req.offered[next(changed, held[0])]
        if self._cache.page_of(cached.page) is cached:
            self._cache.drop(cached)

    def keep(self, req: DecodeRequest, finished: Finished) -> None:
        """The engine is finished with ``req``: its complete pages, of prompt and answer, become the cache's. Nothing is
        kept of a state that was not proved.
        """
        if self._cache is None or not req.resumed or req.expected is None or Check.DIGEST in req.skipped:
            return
        keys = req.keys
        if keys is None or finished.pages:
            answer = finished.tokens[len(req.request.prompt_ids) :]
            keys = self._cache.keys_of(req.packed_prompt + pack_tokens(answer), req.request.cache_salt)
        held = set(req.expected.held_pages)
        for index, digest in enumerate((*req.expected.page_digests, *finished.pages)):
            if index not in held:
                self._cache.keep_page(req.key, req.key.owner, keys, index, digest)

    def give_back(self, req: DecodeRequest) -> None:
        """Nobody reads or writes there any more."""
        if req.placement is not None:
            self._owners.clear(_with_offers(req.placement, req.offered), req.key.owner)
        if self._allocator.state_of(req.key) is not ItemState.FREE:
            self._allocator.release(req.key)
        if self._cache is not None:
            self._cache.trim()


def _with_offers(placement: Placement, offered: tuple[CachedPage, ...]) -> Placement:
    """All slots and pages that a request has."""
    return replace(placement, pages=(*placement.pages, *(cached.page for cached in offered)))
